"""What judges one answer."""

from __future__ import annotations

from typing import Any

from agentrl.env.agent import StepState


class Reward:
    """Judges the answer to a task. Whoever uses it calls `open` before and `close` after, any number of times."""

    is_async = False

    def open(self) -> None:
        """Another user."""

    async def close(self) -> None:
        """One user fewer; after the last, what is shared between them is released."""

    def judge(self, state: StepState) -> Any:
        """A `StepResult` that ends the episode, or an awaitable of one if `is_async`."""
        raise NotImplementedError
