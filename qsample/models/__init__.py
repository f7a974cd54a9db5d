"""Models with the same verbs, from any source: checkpoints, decoder files, packages."""
