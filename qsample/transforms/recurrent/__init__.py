"""Recurrent and convolutional layers over retained states, which padding and rows that have ended leave alone."""
