"""Advantages, losses, corrections, KL, filters: pure functions on flat tensors of action tokens.

Nothing here knows padding or packing. A tensor marked ``# [A]`` has one entry per action token; index tensors say which
row, episode or group a token belongs to. This file imports nothing, so that `agentrl.algo.filters` and
`agentrl.rollout.penalties`, which are plain Python, load without torch.
"""
