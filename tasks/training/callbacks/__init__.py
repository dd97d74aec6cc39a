"""What happens around the training steps: averaging, checkpoints, guards, measurements and pictures."""
