"""What every request passes: its limits, its errors, its JSON; and the page at /."""
