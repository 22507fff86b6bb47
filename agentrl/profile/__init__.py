"""Where a run's time went, and what other sizes would give."""
