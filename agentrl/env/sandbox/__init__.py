"""Sandboxes: places in which programs of a model, and of nobody's trust, run, and where their files are."""
