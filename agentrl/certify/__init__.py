"""Proofs on a small twin of a model: what the learner and the engines compute is what the model computes."""
