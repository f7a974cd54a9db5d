"""The rows of a batch: who sits where, and what the device does next."""
