"""A machine before a run: its limits, its packages, its devices, and short trials of everything that a run needs."""
