"""Files and folders, whoever they belong to: what writing a package aside and swapping it into place needs."""
