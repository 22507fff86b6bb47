"""Advantages, losses, corrections, KL, filters: pure functions on flat tensors of action tokens.

Nothing here knows padding or packing. A tensor marked ``# [A]`` has one entry per action token; index tensors say which
row, episode or group a token belongs to. An estimator, a loss or a correction is a file in the folder of its kind, with its options, its
facts, its function, its formula and source. They and filters load without torch, so that a configuration can be checked quickly; KL is for
the learner and imports it.
"""
