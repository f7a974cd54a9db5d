"""The sampler: from logits to the next token and the new state, exact over the whole vocabulary."""
