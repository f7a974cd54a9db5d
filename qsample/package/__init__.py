"""A package on disk: its metadata, reading it verified, writing it whole."""
