"""`qsample evaluate`: command.py has its options, screen.py its table and JSON."""
