"""The image classification task."""
