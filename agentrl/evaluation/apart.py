"""Evaluations of a run on engines of their own (``--eval-engines``): neither the learner nor the other engines wait for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel

from agentrl.core.errors import EngineDeadError
from agentrl.evaluation.evaluations import Evaluations
from agentrl.flow.apart import ApartPool
from agentrl.flow.driver import first_cause
from agentrl.flow.plan import TrainingConfig
from agentrl.flow.state import AfterStep, SafePoint

_log = logging.getLogger(__name__)


class _Playing:
    """One evaluation under way."""

    def __init__(self) -> None:
        self.captured = anyio.Event()  # it is known how its engines get the weights, or they have them where that takes the learner
        self.ended = anyio.Event()
        self.figures: dict[str, float] = {}


class EvaluationsApart:
    """Evaluates a run's model every few steps on `engines`; a hook for `agentrl.flow.driver.train`.

    An evaluation takes the weights of its step and goes on for as long as it needs, while the run trains and publishes others. Its
    figures are in the first row that is written when it has ended, with ``eval/step``. There is one at a time: the step before the next
    one, and the last step, wait for it. If all engines are lost for good, `shared` evaluates from then on.
    """

    def __init__(self, shared: Evaluations, engines: ApartPool, *, num_engines: int, num_steps: int) -> None:
        self._own, self._shared, self._engines, self._num_steps = shared.on(engines, num_engines), shared, engines, num_steps
        self._facts = {"eval/engines": float(num_engines)}
        self._playing: _Playing | None = None

    async def __call__(self, point: SafePoint) -> Mapping[str, float]:
        """Begin an evaluation if it is time to.

        Returns:
            The figures of one that has ended since the step before.
        """
        figures = self._take() if self._playing is not None and self._playing.ended.is_set() else {}
        if self._own.due(point.step):
            if self._engines.gone:
                return {**figures, **await self._shared(point)}
            await self._begin(point)
        if self._playing is not None and (point.step == self._num_steps or self._own.due(point.step + 1)):
            point.beside(self._wait)
        return figures

    async def _begin(self, point: SafePoint) -> None:
        playing = self._playing = _Playing()
        # Written now: when it is known whether this model is the best, the learner holds another one.
        point.apart(partial(self._play, point, playing, await self._own.write_model()))
        if self._engines.takes_together:
            await playing.captured.wait()
        else:
            point.beside(partial(_until, playing.captured))

    def _take(self) -> dict[str, float]:
        playing, self._playing = self._playing, None
        return playing.figures if playing is not None else {}

    async def _wait(self) -> dict[str, float]:
        if self._playing is not None:
            await self._playing.ended.wait()
        return self._take()

    async def _play(self, point: SafePoint, playing: _Playing, written: Path | None) -> None:
        """Take the weights and evaluate them.

        Consumes the weights that are live after the step. Produces figures, which the hook after a later step hands on. Waits for its
        engines. Unblocked by them, or by the stall time-out of the evaluation.
        """
        try:
            await point.until_live()
            update = self._engines.current(point.step)
            if not self._engines.takes_together:
                playing.captured.set()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._engines.supervise)
                await anyio.lowlevel.checkpoint()  # it is at work before the weights come
                await self._engines.take(update)
                playing.captured.set()
                figures = await self._own.evaluate(point.step, lambda summary, done, total: point.progress(), written)
                playing.figures = figures | self._facts
                tasks.cancel_scope.cancel()
        except* EngineDeadError as errors:
            _log.warning("the evaluation of step %d has no figures: %s", point.step, first_cause(errors))
        finally:
            self._own.discard(written)
            # Also after a failure, because steps wait for both.
            playing.captured.set()
            playing.ended.set()


async def _until(event: anyio.Event) -> None:
    await event.wait()


def evaluations_apart(training: TrainingConfig, shared: Evaluations, engines: ApartPool | None) -> AfterStep:
    """Return the hook that evaluates a run: `shared` itself without `engines`."""
    if engines is None:
        return shared
    return EvaluationsApart(shared, engines, num_engines=training.eval_engines, num_steps=training.num_steps)
