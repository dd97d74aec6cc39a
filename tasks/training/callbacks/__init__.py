"""Callbacks of the training loop: averaging, checkpoints, guards, measurements and pictures."""
