"""A caller's functions of the kind that transformers takes, called between steps."""
