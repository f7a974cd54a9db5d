"""Graph passes, one file each; the targets list them in order."""
