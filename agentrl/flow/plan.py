"""Settings of the flow of groups: overlap of generation and training, filtering, and reaction to failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from agentrl.core.settings import Alias, Count, Fraction, NonNegative, ResumeMayChange, Share, UserFile


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Overlap, filtering of groups, reaction to failures."""

    groups_per_step: Annotated[Count, Alias("--rollout-batch-size")] = 16
    """Groups that make one optimizer step."""
    asynchronous: Annotated[bool, Alias("--async-train")] = False
    """Generate while training; short for ``--max-staleness 1``."""
    max_staleness: Annotated[Annotated[int, Ge(0), Le(64)] | None, Alias("--async-queue-size")] = None
    """Optimizer steps a trained token may be older than the weights it trains; 0 is synchronous training."""
    task_sampling: Literal["epochs", "curriculum", "failures", "learnability"] = "epochs"
    """Order of drawing tasks: ``epochs`` in an order of the seed; by the pass rate seen so far, ``curriculum`` (each task once, the easiest
    first), or at random in proportion to 1 - rate (``failures``) or rate x (1 - rate) (``learnability``)."""
    task_exploration: Share = 0.1
    """With ``--task-sampling failures`` or ``learnability``: share of the draws that goes to all tasks alike."""
    curriculum_key: str = ""
    """With ``--task-sampling curriculum``: number in a task's metadata that orders tasks of the same pass rate, the smallest first."""
    dynamic_filtering: bool = False
    """Train only on groups with different rewards and a mean score strictly inside ``--dynamic-filtering-range``."""
    dynamic_filtering_range: Annotated[tuple[float, float], Alias("--dynamic-filtering-reward-range")] = (0.0, 1.0)
    """Open interval of mean scores that are kept."""
    group_filter: Annotated[str, UserFile] = ""
    """Function of your own, ``file.py:name``, that says which groups are trained, in place of ``--dynamic-filtering``."""
    group_reward: Annotated[str, UserFile] = ""
    """Reward that sees all episodes of a group: ``majority``, ``ranking``, ``diversity``, or a function of your own, ``file.py:name``."""
    group_reward_weight: float = 1.0
    """Factor of ``--group-reward``."""
    group_reward_mode: Literal["add", "replace"] = "add"
    """``add`` it to the environment's reward; ``replace`` this, which is then only measured, as score."""
    min_pass_rate: Annotated[Fraction, ResumeMayChange] = 0.01
    """Stop the run if a smaller share of the last groups (at least 512) passes the filter; 0 never stops it."""
    oversample: NonNegative = 0.0
    """Groups to start beyond those a step trains on, as a share of them; the first to finish are kept and the rest is dropped.
    Saves waiting for the slowest, favours short episodes, and makes even a synchronous run depend on timing."""
    group_quorum: Share = 1.0
    """Share of a group's episodes that have to end well before the group may be closed without the rest; 1: it waits for all. Saves
    waiting for the slowest, makes even a synchronous run depend on timing, and the policy learns less of what takes long."""
    straggler_factor: Annotated[float, Gt(1)] = 3.0
    """With ``--group-quorum``: how many times the median of those that ended the rest may take before it is withheld."""
    branch_at: Annotated[int, Ge(1)] | Literal["never", "entropy"] = "never"
    """Fork episodes at the turn of this number, counted from 0, so that the returns of several continuations compare that turn; or, with
    ``entropy``, at the first turn that the model is unsure of. Needs an environment with `snapshot` and `restore`, or
    ``--env-isolation process``."""
    branches: Annotated[int, Ge(2)] = 2
    """With ``--branch-at``: episodes of a group that share the turns before a fork, the one that was played from its beginning included."""
    branch_entropy: NonNegative = 0.2
    """With ``--branch-at entropy``: nats per token by which the mean of -log p over a turn's first 16 tokens exceeds that of the first
    turn."""
    max_attempts: Annotated[Count, ResumeMayChange] = 2
    """Attempts at a group before it is dropped with its reason."""
    max_failure_rate: Annotated[Fraction, ResumeMayChange] = 0.5
    """Stop the run if more than this share of the last 64 attempts at groups (at least 8) failed; see ``--max-attempts``."""

    @property
    def staleness(self) -> int:
        """The bound S in force: `max_staleness`, else 1 with `asynchronous`, else 0."""
        return int(self.asynchronous) if self.max_staleness is None else self.max_staleness
