"""Weights and caches in fewer bits."""
