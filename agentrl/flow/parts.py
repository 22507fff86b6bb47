"""Handing a step's groups to the learner, all at once or in parts.

Parts are cut by position, not by arrival, and go to the learner in order, so that the same groups give the same bits
whatever comes first. A part that is there waits for those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.core.protocols import TrainResult
from agentrl.flow.queue import Accepted
from agentrl.flow.state import RunState


@dataclass(slots=True)
class Handed:
    """What of one step the learner has been given.

    Attributes:
        groups: In order; all of them are still in the queue until the step takes them.
        taken_s: Clock reading when each was handed over.
        spans: Clock readings before and after each call of the learner.
        seconds: Time that the learner spent training, by its own account.
    """

    groups: list[Accepted] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def learner_s(self) -> float:
        """Time in which the learner was waited for."""
        return sum(end - begin for begin, end in self.spans)

    def early_s(self) -> float:
        """Part of `learner_s` before the last of the groups was accepted."""
        last_s = max(group.accepted_s for group in self.groups)
        return sum(max(0.0, min(end, last_s) - begin) for begin, end in self.spans)


async def train_early(run: RunState, step: int) -> Handed:
    """Train on the first parts of a step while its last groups are still under way.

    Consumes nothing: the groups stay in the queue. Waits for the oldest groups to be accepted. Unblocked by `collect`. Gives up when
    the run is stopped: what the learner holds then is lost, and the groups are run again on resumption.
    """
    handed = Handed()
    ends = run.settings.part_ends
    for number, end in enumerate(ends[:-1], 1):
        part = f"part {number} of {len(ends)}"
        run.board.waiting("train", f"the {end} oldest groups to be accepted (step {step + 1}, {part})")
        oldest = await run.queue.oldest(end, step)
        if len(oldest) < end:
            break
        run.board.waiting("train", f"the learner to train step {step + 1}, {part}")
        await hand(run, step, oldest[len(handed.groups) :], handed, last=False)
    return handed


async def hand(run: RunState, step: int, groups: Sequence[Accepted], handed: Handed, *, last: bool) -> TrainResult:
    """Give the next groups to the learner and wait until it has trained on them; as a whole step if they are all of it."""
    if step == run.first_step and not handed.spans:
        run.observer.on_stage("first training step")
    begin_s, refs = run.clock(), [group.ref for group in groups]
    if last and not handed.spans:
        result = await run.learner.train(step, refs)
    else:
        result = await run.learner.train_part(step, refs, first=not handed.spans, last=last)
    if not last:
        run.board.progress()
    handed.groups += groups
    handed.taken_s += [begin_s] * len(groups)
    handed.spans.append((begin_s, run.clock()))
    handed.seconds += result.seconds
    return result
