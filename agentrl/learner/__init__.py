"""Training: groups to a batch, the training step, weights out."""
