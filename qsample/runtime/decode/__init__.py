"""Decoding: the rows of a batch on the device, which sequence gets which, and what the device does next."""
