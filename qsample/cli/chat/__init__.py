"""`qsample chat`: command.py has its options, conversation.py the messages, screen.py the terminal."""
