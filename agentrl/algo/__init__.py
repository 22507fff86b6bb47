"""Advantages, losses, corrections, KL, filters: pure functions on flat tensors of action tokens.

Nothing here knows padding or packing. A tensor marked ``# [A]`` has one entry per action token; index tensors say which
row, episode or group a token belongs to. Estimators, losses and filters, with their facts, load
without torch, so that a configuration can be checked quickly; KL, aggregation and corrections are for the learner and import it.
"""
