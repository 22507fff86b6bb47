"""Environments: what users write, how it is loaded, and the one place that calls it."""
