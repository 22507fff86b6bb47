"""Talking to servers that are not trusted."""
