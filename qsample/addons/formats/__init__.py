"""Formats of stored weights: the packed layers of other quantizers' checkpoints, and the files of
llama.cpp."""
