"""The environment of an episode as the episode loop sees it, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.core.types import Span, Task
from agentrl.env.agent import ResetResult, StepResult, StepState


class Snapshot(Protocol):
    """State of an episode between two turns, which one session goes on with, or nobody."""

    def discard(self) -> None:
        """Release what it holds, if no session took it."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """The value that the user's `snapshot` returned; see `Snapshot`."""

    value: Any

    def discard(self) -> None:
        """Do nothing: it is garbage then."""


class Session(Protocol):
    """One episode's environment, wherever it runs; `EnvSession` says what each method raises."""

    async def reset(self, task: Task, seed: int) -> ResetResult:
        """Begin the episode."""

    async def step(self, state: StepState) -> StepResult:
        """Give the environment one turn of the model."""

    async def snapshot(self, count: int) -> list[Snapshot]:
        """Return its state as often as is asked for, each for one other session."""

    async def restore(self, snapshot: Snapshot, task: Task) -> None:
        """Go on with the episode of another session, in place of `reset`."""

    def take_spans(self) -> tuple[Span, ...]:
        """Return the times of tools within the last call, in seconds since it began, and forget them."""

    async def close(self) -> None:
        """End it, whatever happened; errors are logged, not raised."""
