"""Calls of tools: how models write them, demanded or found in the text."""
