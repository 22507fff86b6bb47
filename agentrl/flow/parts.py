"""Training on a step's first groups before the last is there.

Parts are cut by position, not by arrival, and go to the learner in order, so that the same groups give the same bits
whatever comes first. A part that is there waits for those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.flow.queue import Accepted
from agentrl.flow.state import RunState


@dataclass(slots=True)
class Early:
    """What the learner has of a step that is not complete.

    Attributes:
        taken_s: Clock reading at which each group was handed over, in order; all of them stay in the queue until the step takes them.
        spans: Clock readings before and after each call of the learner.
        seconds: Time that the learner spent training, by its own account.
    """

    taken_s: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def learner_s(self) -> float:
        """Time in which the learner was waited for."""
        return sum(end - begin for begin, end in self.spans)

    def before_last(self, groups: Sequence[Accepted]) -> float:
        """Part of `learner_s` before the last of the step's groups was accepted."""
        last_s = max(group.accepted_s for group in groups)
        return sum(max(0.0, min(end, last_s) - begin) for begin, end in self.spans)


async def train_early(run: RunState, step: int) -> Early:
    """Train on the first parts of a step while its last groups are still under way; at once done if there is one part.

    Consumes nothing: the groups stay in the queue. Waits for the oldest groups to be accepted. Unblocked by `collect`. Gives up when
    the run is stopped: what the learner holds then is lost, and the groups are run again on resumption.
    """
    early, ends = Early(), run.settings.part_ends
    for number, end in enumerate(ends[:-1], 1):
        part = f"part {number} of {len(ends)}"
        run.board.waiting("train", f"the {end} oldest groups to be accepted (step {step + 1}, {part})")
        oldest = await run.queue.oldest(end, step)
        if len(oldest) < end:
            break
        begin_s, groups = run.clock(), oldest[len(early.taken_s) :]
        if step == run.first_step and number == 1:
            run.observer.on_stage("first training step")
        run.board.waiting("train", f"the learner to train step {step + 1}, {part}")
        result = await run.learner.train_part(step, [group.ref for group in groups], first=number == 1, last=False)
        run.board.progress()
        early.taken_s += [begin_s] * len(groups)
        early.spans.append((begin_s, run.clock()))
        early.seconds += result.seconds
    return early
