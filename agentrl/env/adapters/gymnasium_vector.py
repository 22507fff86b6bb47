"""Any gymnasium vector environment as an agent's environment: episodes share it, a lane each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from agentrl.env.adapters.gymnasium import SEEDS, GymEnv
from agentrl.env.adapters.lanes import LanePool, SharedEnv
from agentrl.env.agent import ResetResult, ResetState, StepResult, StepState

if TYPE_CHECKING:
    import gymnasium

_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[type[Any], LanePool]] = WeakKeyDictionary()


class GymVectorEnv(GymEnv):
    """One episode on a lane of a gymnasium vector environment, which is kept for the episodes after it.

    The same seed gives the same episode as with `GymEnv`. A step waits for the other running episodes on the same vector
    environment, so this pays only if one batched step costs much less than its steps one by one.

    Attributes:
        num_envs: Lanes of a vector environment; with more episodes than lanes, there are several vector environments.
        vectorization_mode: ``sync`` (one thread) or ``async`` (a process per lane), as for `gymnasium.make_vec`.
        straggler_s: Seconds that a batch waits for an answer; an episode that takes longer fails, and the others go on.
    """

    num_envs: ClassVar[int] = 8
    vectorization_mode: ClassVar[str] = "sync"
    straggler_s: ClassVar[float] = 30.0

    _lane: tuple[SharedEnv, int] | None = None

    @classmethod
    def make_vector(cls) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Make a vector environment whose lanes can be reset one by one.

        gymnasium's own, in any autoreset mode; one of another kind must have the mode DISABLED and take a list of seeds with
        a ``reset_mask``.
        """
        import gymnasium

        options: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}
        if cls.vectorization_mode == "async":
            options["context"] = "forkserver"  # this process has threads, and forking it could deadlock
        return gymnasium.make_vec(
            cls.env_id,
            cls.num_envs,
            vectorization_mode=cls.vectorization_mode,
            vector_kwargs=options,
            disable_env_checker=True,
            **cls.env_options,
        )

    async def reset(self, state: ResetState) -> ResetResult:  # type: ignore[override]
        """Take a lane and reset it."""
        shared, lane = self._lane = await self._pool().lend()
        self.env = shared.view(lane)
        return self._begun(await shared.reset(lane, state.seed % SEEDS))

    async def step(self, state: StepState) -> StepResult:  # type: ignore[override]
        """Act as the model said together with the other lanes, or tell it what was wrong with what it said."""
        self._env()
        action = self._action(state)
        if isinstance(action, StepResult) or self._lane is None:
            return action  # type: ignore[no-any-return]
        shared, lane = self._lane
        return self._stepped(await shared.step(lane, action))

    async def close(self) -> None:  # type: ignore[override]
        """Give the lane back."""
        if self._lane is not None:
            shared, lane = self._lane
            self._lane = self.env = None
            shared.release(lane)

    @classmethod
    def _pool(cls) -> LanePool:
        pools = _POOLS.setdefault(asyncio.get_running_loop(), {})
        return pools.setdefault(cls, LanePool(cls.make_vector, cls.straggler_s))
