"""Supervised and preference training: SFT, reward models, DPO and its kin, distillation; the commands around reinforcement learning.

`agentrl.config.methods` is the table of methods, `agentrl.config.tune` holds their settings, `agentrl.tune.data` reads and checks rows and
`agentrl.tune.encode` makes tokens of them; none of these imports torch. `agentrl.algo.objectives` has the loss and the metrics of each
method, and `agentrl.tune.loop` takes the steps of all of them on the learner that reinforcement learning has.
"""

from __future__ import annotations

from agentrl.tune.directory import TuneResult
from agentrl.tune.run import tune

__all__ = ["TuneResult", "tune"]
