"""Models with the same verbs, whatever they come from: checkpoints, decoder files, packages."""
