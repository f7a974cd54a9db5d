"""Checkpoints of every kind as a loaded Hugging Face model."""
