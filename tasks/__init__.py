"""Training, evaluation and prediction with PyTorch Lightning."""
