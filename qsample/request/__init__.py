"""A request: its parameters and arguments, checked when they enter and typed from there on."""
