"""Adapters from other suites of environments."""
