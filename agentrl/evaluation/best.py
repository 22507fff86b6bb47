"""The best model of a run by a chosen metric: RUN_DIR/best, a Hugging Face directory with ``best.json`` in it.

Model and figure are replaced together, so what ``best.json`` says is always about the weights beside it. It is also what a
resumed run goes on from: nothing about the best model is kept elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import anyio

from agentrl.core.callbacks import BestModelSaved
from agentrl.core.disk import write_problem
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.files import recover_directory, replace_directory, temporary_directory
from agentrl.core.protocols import Learner

FOLDER, FACTS = "best", "best.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation of a run."""

    step: int  # steps after which it was measured, which is the version of its weights
    metric: str  # as in ``metrics.jsonl``
    value: float


class BestModel:
    """Keeps the model with the highest value of one metric; of equal ones the first.

    The learner writes the model, and is asked only while it holds the weights that were measured. A resumed run goes on with the
    search; in a new run, the best model that is there is another run's, and is replaced.
    """

    def __init__(self, run_dir: Path, learner: Learner, metric: str, *, resumed: bool = False) -> None:
        self._target, self._learner, self._metric = (run_dir / FOLDER).absolute(), learner, metric
        found = read_best(run_dir) if resumed else None
        self.best = found if found is not None and found.metric == metric else None  # so far

    async def write(self) -> Path:
        """Write the model that the learner holds now, to be the best if `consider` finds it so; returns the directory.

        Raises:
            CheckpointError: If it cannot be written.
        """
        temporary = await asyncio.to_thread(temporary_directory, self._target)
        with anyio.CancelScope(shield=True):  # the learner would go on writing
            try:
                await self._learner.save_model(str(temporary))
            except BaseException:
                self.discard(temporary)
                raise
        return temporary

    def discard(self, written: Path) -> None:
        """Remove what `write` wrote, if it is still there."""
        for left in (written, _average_of(written)):
            shutil.rmtree(left, ignore_errors=True)

    async def consider(self, step: int, metrics: Mapping[str, float], written: Path | None = None) -> BestModelSaved | None:
        """Keep the model of `step` if its metric is better than what was best so far; returns what was saved.

        Nothing is done if failures of the evaluation after `step` left the metric out.

        Args:
            step: Steps done, which is the version of the weights that were measured.
            metrics: The figures of the evaluation.
            written: Where `write` wrote the model; `None` if the learner still holds it.

        Raises:
            ConfigError: If nothing failed and yet there is no such figure.
            CheckpointError: If the model cannot be written; the best one before is intact.
        """
        value = metrics.get(self._metric, math.nan)
        if math.isnan(value):
            self._check_name(metrics)
            return None
        if self.best is not None and value <= self.best.value:
            return None
        best = Best(step=step, metric=self._metric, value=value)
        if written is None:
            written = await self.write()
        with anyio.CancelScope(shield=True):  # the thread would go on
            try:
                await asyncio.to_thread(self._replace, written, _average_of(written), best)
            finally:
                self.discard(written)
        self.best = best
        return BestModelSaved(step=step, metric=self._metric, value=value, path=self._target)

    def _replace(self, temporary: Path, average: Path, best: Best) -> None:
        try:
            (temporary / FACTS).write_text(json.dumps(asdict(best)) + "\n", encoding="ascii")
        except OSError as error:
            raise CheckpointError(f"{self._target} cannot be written: {write_problem(error, self._target)}") from error
        replace_directory(temporary, self._target)
        if average.exists():
            replace_directory(average, self._target.with_name(f"{FOLDER}-ema"))

    def _check_name(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("eval/tasks") and not metrics.get("eval/failed_episodes"):
            known = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
            raise ConfigError("--keep-best", self._metric, "is no figure of this evaluation", f"There are {known}.")


def _average_of(written: Path) -> Path:
    """Return where the learner writes the moving average of the weights, if it keeps one."""
    return written.with_name(f"{written.name}-ema")


def read_best(run_dir: Path) -> Best | None:
    """Return the facts about the best model of a run; `None` if there is none."""
    recover_directory((run_dir / FOLDER).absolute())
    try:
        facts = json.loads((run_dir / FOLDER / FACTS).read_text(encoding="ascii"))
        return Best(step=int(facts["step"]), metric=str(facts["metric"]), value=float(facts["value"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
