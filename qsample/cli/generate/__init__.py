"""`qsample generate`: prompts of a command line, or of a file."""
