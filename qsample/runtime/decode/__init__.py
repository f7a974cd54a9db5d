"""Decoding: the rows of a batch on the device, the sequences that get them, and the next job of the device."""
