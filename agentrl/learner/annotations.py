"""Figures of every trained token of recorded episodes, taken from a training step and appended to the run.

Nothing is computed for them that the step does not compute anyway, but for the share of a token in the loss; what is trained is bit for
bit the same with them and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentrl.core.annotations import MASKS, Annotation, Mask
from agentrl.core.disk import write_problem
from agentrl.core.errors import StorageError
from agentrl.core.types import Group, floats
from agentrl.learner.batch import Batch
from agentrl.learner.layout import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.learner.targets import UpdateTargets

OWN = ("logprob", "entropy", "weight", "ratio", "loss")
"""Figures that only the rank knows which trains the token; behind them two flags, clipped and skipped."""
FIRST = 2
"""The first of these are those of the first pass, the others those of the last."""


def recorded_trajectories(groups: Sequence[Group]) -> frozenset[str]:
    """Return the names of the trajectories that are recorded."""
    return frozenset(t.trajectory_id for group in groups for t in group.first_episodes(group.record))


class Annotator:
    """Collects the figures of one step; all ranks have one, and the first writes the lines.

    Args:
        batch: The batch, on the device of the ranks.
        names: Trajectories to annotate.
        ranks: The ranks.
        path: File that gets the lines.
    """

    def __init__(self, batch: Batch, names: frozenset[str], ranks: Ranks, path: Path) -> None:
        self._batch, self._ranks, self._path = batch, ranks, path
        self._rows = [row for row, item in enumerate(batch.rows) if item.trajectory_id in names]
        self._own = torch.zeros(len(OWN) + 2, batch.num_actions, device=batch.row.device)
        self._seen = False

    def take(
        self, micro: MicroBatch, *, first: bool, entropy: Tensor, new: Tensor, figures: Sequence[Tensor], clipped: Tensor | None
    ) -> None:
        """Take the figures of a micro-batch.

        Args:
            micro: The micro-batch.
            first: True in the first pass over the batch.
            entropy: Entropy of the policy at each token. # [a]
            new: Log-probabilities of this pass. # [a]
            figures: Weight, ratio and share of the loss of each token. # [a] each
            clipped: Tokens whose gradient the loss removed or bounded; `None` stands for none. # [a] bool
        """
        if not self._ranks.leads:
            return
        flag = torch.zeros_like(new) if clipped is None else clipped.to(new.dtype)
        self._seen = True
        if first:
            self._own[:FIRST, micro.actions] = torch.stack([new, entropy]).detach().float()
        self._own[FIRST:-1, micro.actions] = torch.stack([*figures, flag]).detach().float()

    def skip(self, micros: Sequence[MicroBatch]) -> None:
        """Note that the update with these micro-batches was skipped."""
        for micro in micros if self._ranks.leads else ():
            self._own[-1, micro.actions.to(self._own.device)] = 1.0

    def write(self, step: int, signals: UpdateTargets, *, behaviour_is_old: bool) -> None:
        """Append the annotations to the file, on the first rank; collective. See `lines` for the arguments.

        Raises:
            StorageError: If they cannot be written.
        """
        append(self._path, self.lines(step, signals, behaviour_is_old=behaviour_is_old))

    def lines(self, step: int, signals: UpdateTargets, *, behaviour_is_old: bool) -> Iterator[Annotation]:
        """Yield the annotations, on the first rank; collective.

        Args:
            step: Steps done, this one included.
            signals: What was known before the first update.
            behaviour_is_old: True if `signals.old` are the engine's log-probabilities.
        """
        batch = self._batch
        chosen = torch.isin(batch.row, torch.tensor(self._rows, device=batch.row.device)).nonzero().squeeze(1)
        own = self._ranks.sum(self._own[:, chosen].contiguous())
        if not self._ranks.first or not self._rows:
            return
        found = dict(zip(OWN, own, strict=False)) if self._seen else {}
        masks = self._masks(own, signals, chosen)
        if signals.old is not None and not behaviour_is_old:
            found["logprob"] = signals.old[chosen]
        known = {"weight": signals.weights, "advantage": signals.advantages, "reference": signals.reference}
        if signals.critic is not None:
            known |= {"value": signals.critic.values, "return": signals.critic.returns}
        for name, values in known.items():
            if values is not None and name not in found:
                found[name] = values[chosen]
        figures = {name: values.detach().float().cpu().numpy() for name, values in found.items()}
        trajectories = [batch.rows[row].trajectory_id for row in batch.row[chosen].tolist()]
        for name, part in _runs(trajectories):
            yield Annotation(
                trajectory_id=name,
                step=step,
                figures={figure: floats(values[part]) for figure, values in figures.items()},
                masks=masks[part],
            )

    def _masks(self, own: Tensor, signals: UpdateTargets, chosen: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Number of the mask of each token, the first that holds. # [a] uint8."""
        count = len(chosen)
        if not self._seen:
            return np.full(count, MASKS.index(Mask.WARMUP), np.uint8)
        holds = {
            Mask.OFF_POLICY: own[OWN.index("weight")] == 0.0,
            Mask.LOW_ENTROPY: ~signals.trained[chosen] if signals.trained is not None else torch.zeros(count, dtype=torch.bool),
            Mask.CLIPPED: own[-2] > 0.0,
            Mask.SKIPPED: own[-1] > 0.0,
        }
        numbers = [MASKS.index(mask) for mask in holds]
        found = np.select([flags.cpu().numpy() for flags in holds.values()], numbers, MASKS.index(Mask.TRAINED))
        return found.astype(np.uint8)


def _runs(names: Sequence[str]) -> Iterator[tuple[str, slice]]:
    """Yield each name with the part of the sequence that holds it; equal names follow each other."""
    start = 0
    for end in range(1, len(names) + 1):
        if end == len(names) or names[end] != names[start]:
            yield names[start], slice(start, end)
            start = end


def append(path: Path, annotations: Iterator[Annotation]) -> None:
    """Append the lines of annotations to a file, all at once.

    Raises:
        StorageError: If it cannot be written.
    """
    text = "".join(annotation.line() + "\n" for annotation in annotations)
    if not text:
        return
    try:
        with path.open("a", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {write_problem(error, path)}") from error
