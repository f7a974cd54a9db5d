"""Packages and decoder files of other exporters as models with one set of verbs."""
