"""Portable package → device package."""
