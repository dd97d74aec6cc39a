"""Stacks of mixers: timm image models."""
