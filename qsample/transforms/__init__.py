"""From a Hugging Face causal LM to the modules that its graphs are traced from."""
