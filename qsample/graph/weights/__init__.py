"""Weights of a graph that are stored in another way than the graph reads them."""
