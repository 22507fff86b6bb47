"""Settings of a run's length and of the flow of groups: overlap of generation and training, filtering, and reaction to failures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count, CountOrZero, Fraction, NonNegative, ResumeMayChange, Share, UserFile

TASK_RULES = ("epochs", "curriculum", "failures", "learnability")
"""Values of ``--task-sampling``, beside ``curriculum:KEY``."""
BRANCH_ENTROPY = 0.2


def is_task_rule(rule: str) -> bool:
    """Return True for a value of ``--task-sampling``."""
    return rule in TASK_RULES or rule.removeprefix("curriculum:") not in ("", rule)


def branch_entropy(at: str) -> float:
    """Return the nats per token that a value of ``--branch-at`` names: ``entropy`` or ``entropy:0.5``.

    Raises:
        ConfigError: If it has another form.
    """
    kind, colon, number = at.partition(":")
    try:
        nats = float(number) if colon else BRANCH_ENTROPY
    except ValueError:
        nats = math.nan
    if kind != "entropy" or not nats >= 0:
        raise ConfigError("--branch-at", at, "names no turn", "Write the number of a turn from 1, entropy, entropy:0.5 or never.")
    return nats


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, checkpoints, evaluations, and place of a run."""

    num_steps: Annotated[Count, ResumeMayChange] = 50
    """Optimizer steps to train for."""
    run_dir: Annotated[Path | None, ResumeMayChange] = None
    """Directory of everything that this run writes. Default: ``runs/<environment>-<date>-<time>``."""
    save_every: Annotated[CountOrZero, ResumeMayChange] = 0
    """Steps between checkpoints, for ``--resume``; the last step gets one too. 0: none."""
    keep_checkpoints: Annotated[Count, ResumeMayChange] = 2
    """Checkpoints to keep; older ones are removed when a newer one is complete."""
    checkpoint_upload: Annotated[str, ResumeMayChange] = ""
    """Folder for copies of complete checkpoints, made while the run goes on: an address (``s3://bucket/run``, ``gs://``, ``az://``) or a
    path. As many are kept as in the run's directory. ``--resume`` takes this address, and ``--resume auto`` looks there too."""
    stop_timeout_s: Annotated[NonNegative, ResumeMayChange] = 15.0
    """Seconds that a first SIGINT or SIGTERM leaves to the step under way and a checkpoint after it; then the run ends without."""
    resume: Annotated[str, ResumeMayChange] = ""
    """Directory of a run to continue with its own settings; its ``--checkpoint-upload``; or ``auto``: continue the run in ``--run-dir``
    if there is one."""
    skip_checks: Annotated[tuple[Literal["env", "model", "memory"], ...], ResumeMayChange] = ()
    """Checks before training that are left out. ``env``: one scripted episode, which ends the run if the environment breaks its contract
    there; left out anyway with ``--resume``, ``--ray-address`` and ``--env-isolation process``. ``model``: the learner's attention is
    compared with the model's on a small twin, as by ``agentrl certify``, unless its type is known to be exact. ``memory``: GPUs whose
    memory is certainly too small are refused, as ``agentrl plan`` computes it."""
    max_mismatch: Annotated[NonNegative | Literal["auto", "none"], ResumeMayChange] = "auto"
    """Stop if the log-probabilities that engine and learner give tokens of the same weights differ by more than this on average, nats, in
    the first step, or in the first with published weights; warn later. ``auto``: 0.01 where both compute in float32, else 0.1. 0 or
    ``none``: never."""
    audit_every: Annotated[CountOrZero, ResumeMayChange] = 100
    """Steps between two audits, the first step among them: one row of the batch is computed again, alone, in float32 with eager attention,
    and compared with what the learner made of it (``audit/...``). 0: none."""
    eval_every: Annotated[CountOrZero, ResumeMayChange] = 0
    """Steps between two evaluations during training; the last step gets one too. 0: none."""
    eval_at_start: Annotated[bool, ResumeMayChange] = False
    """Evaluate once before the first step as well."""
    eval_engines: Annotated[CountOrZero, ResumeMayChange] = 0
    """Engines of their own for evaluations, beside those of ``--num-engines``: each evaluation begins there with the weights of its step,
    and neither the learner nor the other engines wait for it. 0: evaluations run on the engines that generate for training."""
    keep_best: Annotated[str, ResumeMayChange] = ""
    """Figure by which the best model is kept in ``RUN_DIR/best``: ``eval/score``, ``eval/reward``, ``eval/pass@1``, or one kind's,
    ``eval/score/hard``; higher is better. Empty: none is kept."""

    @property
    def evaluates(self) -> bool:
        """True if the run has evaluations."""
        return bool(self.eval_every) or self.eval_at_start

    def evaluates_after(self, step: int) -> bool:
        """Return True if there is an evaluation after `step` steps."""
        return bool(self.eval_every) and (step % self.eval_every == 0 or step == self.num_steps)


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Overlap, filtering of groups, reaction to failures."""

    groups_per_step: Count = 16
    """Groups that make one optimizer step."""
    asynchronous: bool = False
    """Generate while training; short for ``--max-staleness 1``."""
    max_staleness: Annotated[int, Ge(0), Le(64)] | None = None
    """Optimizer steps a trained token may be older than the weights it trains; 0 is synchronous training."""
    task_sampling: str = "epochs"
    """Order of drawing tasks: ``epochs`` in an order of the seed; by the pass rate seen so far, ``curriculum`` (each task once, the easiest
    first; those of the same rate by the number under a key of their metadata, the smallest first, with ``curriculum:KEY``), or at random in
    proportion to 1 - rate (``failures``) or rate x (1 - rate) (``learnability``)."""
    flat_groups: Literal["train", "drop", "resample"] = "train"
    """Groups of which the estimator learns nothing, as those of equal rewards with most. ``train``: they are in the batch like others;
    ``drop``: left out, so that the step trains on fewer; ``resample``: other tasks are played in their place (dynamic sampling)."""
    score_range: tuple[float, float] | None = None
    """Open interval: groups whose mean score lies outside are treated as flat ones; 0 1 for groups that all solved or all failed."""
    group_filter: Annotated[str, UserFile] = ""
    """Function of your own, ``file.py:name``, that says which groups are trained, in place of the estimator; other tasks are played for
    the rest, or with ``--flat-groups drop`` none."""
    group_reward: Annotated[str, UserFile] = ""
    """Reward that sees all episodes of a group: ``majority``, ``ranking``, ``diversity``, or a function of your own, ``file.py:name``."""
    group_reward_weight: float = 1.0
    """Factor of ``--group-reward``."""
    oversample: NonNegative = 0.0
    """Groups to start beyond those a step trains on, as a share of them; the first to finish are kept and the rest is dropped.
    Saves waiting for the slowest, favours short episodes, and makes even a synchronous run depend on timing."""
    group_quorum: Share = 1.0
    """Share of a group's episodes that have to end well before the group may be closed without the rest; 1: it waits for all. Saves
    waiting for the slowest, makes even a synchronous run depend on timing, and the policy learns less of what takes long."""
    branch_at: Annotated[int, Ge(1)] | str = "never"
    """Fork episodes at the turn of this number, counted from 0, so that the returns of several continuations compare that turn; or, with
    ``entropy``, at the first turn that the model is unsure of: whose mean of -log p over its first 16 tokens exceeds that of the first turn
    by 0.2 nats per token, or by another number (``entropy:0.5``). Needs an environment with `snapshot` and `restore`, or
    ``--env-isolation process``."""
    branches: Annotated[int, Ge(2)] = 2
    """With ``--branch-at``: episodes of a group that share the turns before a fork, the one that was played from its beginning included."""
    max_attempts: Annotated[Count, ResumeMayChange] = 2
    """Attempts at a group before it is dropped with its reason."""
    max_failure_rate: Annotated[Fraction, ResumeMayChange] = 0.5
    """Stop the run if more than this share of the last 64 attempts at groups (at least 8) failed; see ``--max-attempts``."""

    @property
    def staleness(self) -> int:
        """The bound S in force: `max_staleness`, else 1 with `asynchronous`, else 0."""
        return int(self.asynchronous) if self.max_staleness is None else self.max_staleness
