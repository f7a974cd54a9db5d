"""A Hugging Face causal LM enters; the module that a decode graph is traced from leaves."""
