"""Requests of the engine as answers of the API."""
