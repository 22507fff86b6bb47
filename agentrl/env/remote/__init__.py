"""Clients for untrusted servers."""
