"""Signatures of packages, and what packages are made of (an ML-BOM)."""
