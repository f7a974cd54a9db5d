"""Add-ons: features that build on the core and that the core does not name. It finds them by their entry points."""
