"""Loads checkpoints of every kind as a Hugging Face model."""
