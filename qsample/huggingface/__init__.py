"""What a user of transformers brings along: its keywords, its configurations, its methods. Needs no transformers."""
