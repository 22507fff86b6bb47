"""Supervised and preference training: SFT, reward models, DPO and its kin, distillation; the commands around reinforcement learning.

`agentrl.config.methods` is the table of methods, `agentrl.config.tune` holds their settings, `agentrl.tune.data` reads and checks rows and
`agentrl.tune.encode` makes tokens of them; none of these imports torch. `agentrl.tune.objectives` holds the loss and the metrics of each
method, `agentrl.tune.trainer` the one trainer of all of them.
"""

from __future__ import annotations

from agentrl.tune.directory import TuneResult
from agentrl.tune.run import tune

__all__ = ["TuneResult", "tune"]
