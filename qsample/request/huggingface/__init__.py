"""The interface of transformers, without transformers: keywords, configurations, dtypes and methods
of models."""
