"""The flow on virtual time: engines, environments and a learner that only take time."""
