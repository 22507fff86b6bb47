"""Agent files written for OpenRLHF, unchanged."""
