"""The run itself: admission slots, first-in first-out queue, ledger, and the four loops that keep both sides busy."""
