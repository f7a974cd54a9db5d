"""Mixture-of-experts layers in a form that a static graph can express."""
