"""Events of a run while it trains: rows of metrics to the sinks, evaluations, checkpoints, the best model, an early end."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from agentrl.config.methods import COMMON, LOWER_IS_BETTER, Method
from agentrl.config.tune import TuneEvalConfig, TuneRunConfig
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.callbacks import Callback, MetricsRow
from agentrl.core.files import remove_directory, replace_directory, temporary_directory, write_manifest
from agentrl.core.language_models import copy_processor
from agentrl.core.process import handling_signals
from agentrl.tune.directory import PREFIX, checkpoints_in


class Stop:
    """A request to end early: asked once, the step under way is finished and saved."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Within the block, a first SIGINT or SIGTERM asks for the end, and a second one ends the process; in the main thread only."""
        with handling_signals(self._heard):
            yield self

    def _heard(self, number: int) -> None:
        self.asked = True
        sys.stderr.write("\nagentrl: finishing the step under way, then saving; once more to end at once\n")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Return True if any rank was asked, the same on every rank."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return self.asked
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        # A rank that stopped alone would leave the others waiting in their next collective operation.
        flag = torch.tensor([float(self.asked)], device=device)
        torch.distributed.all_reduce(flag)
        return bool(flag.item())


class Rows:
    """The rows of ``metrics.jsonl``: the metrics of a step and of the evaluation after it are one row.

    Args:
        method: Names of the metrics.
        rank: The first rank tells the sinks.
        sinks: Metric sinks, display and summary.
        epoch_rows: Rows of an epoch, for the metric ``epoch``.
        batch_size: Rows of a step.
    """

    def __init__(self, method: Method, sinks: Sequence[Callback], *, epoch_rows: int, batch_size: int) -> None:
        self._names = (*COMMON, *method.metrics)
        self._sinks, self._epochs_per_step = sinks, batch_size / epoch_rows
        self._step, self._row = 0, dict[str, float]()

    def trained(self, step: int, logs: Mapping[str, Any], seconds: float) -> None:
        """Begin the row of a step."""
        self.flush()
        self._step, self._row = step, {"epoch": step * self._epochs_per_step, **self._named(logs), "time_s": seconds}
        if "num_input_tokens_seen" in logs:
            self._row["tokens"] = float(logs["num_input_tokens_seen"])

    def measured(self, step: int, logs: Mapping[str, Any]) -> dict[str, float]:
        """Add the metrics of an evaluation after a step, and return them by their names without ``eval/``."""
        if step != self._step:
            self.flush()
            self._step = step
        found = self._named({name.removeprefix("eval_"): value for name, value in logs.items() if name.startswith("eval_")})
        if "eval_runtime" in logs:
            self._row["eval/seconds"] = float(logs["eval_runtime"])
        self._row |= {f"eval/{name}": value for name, value in found.items()}
        return found

    def _named(self, logs: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(logs[name]) for name in self._names if isinstance(logs.get(name), int | float)}

    def note(self, **values: float) -> None:
        """Add metrics to the row of the step."""
        self._row |= values

    def flush(self) -> None:
        """Tell the sinks of the row, if there is one."""
        if self._row:
            row, self._row = self._row, {}
            for sink in self._sinks:
                sink.on_metrics(MetricsRow(step=self._step, metrics={"step": self._step, **row}))


class Best:
    """The best model so far by a metric of the evaluation.

    Args:
        metric: Name of the metric; empty keeps none.
        folder: Where the model goes.
        rows: Rows of metrics of an earlier part of the run.

    Attributes:
        since: Evaluations in a row that were not better.
    """

    def __init__(self, metric: str, folder: Path, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.metric, self.folder, self.since = metric.removeprefix("eval/"), folder, 0
        self._value: float | None = None
        # A run that goes on compares with the best of its earlier part, and counts on from there.
        for row in rows:
            if "eval/loss" in row:
                self.better({name.removeprefix("eval/"): value for name, value in row.items()})

    def better(self, metrics: Mapping[str, float]) -> float | None:
        """Return the new best value; `None` if it is not better than the one before."""
        if not self.metric:
            return None
        value = metrics.get(self.metric)
        sign = -1 if self.metric in LOWER_IS_BETTER else 1
        if value is None or value != value or (self._value is not None and sign * value <= sign * self._value):
            self.since += 1
            return None
        self._value, self.since = value, 0
        return value


def save_model(trainer: Any, folder: Path) -> None:
    """Write the model with its tokenizer into a folder, whole or not at all; every rank calls it."""
    first = trainer.is_world_process_zero()
    # The other ranks need only the name; the first one makes the directory.
    partial = folder.with_name(f".{folder.name}.partial")
    if first:
        partial = temporary_directory(folder)
    # No rank writes before the directory is there, and it gets its name only when all have written.
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(partial))
    trainer.accelerator.wait_for_everyone()
    if first:
        copy_processor(trainer.model, partial)
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, which nothing here reads
        shutil.rmtree(partial / "original", ignore_errors=True)
        if holds_adapter(partial) and trainer.model.can_generate():  # peft writes the weights alone
            trainer.model.generation_config.save_pretrained(partial)
        replace_directory(partial, folder)
    trainer.accelerator.wait_for_everyone()


class Follower(TrainerCallback):  # type: ignore[misc]
    """Steers a trainer of transformers by our settings, and passes its metrics on.

    Args:
        rows: Takes the metrics.
        best: Keeps the best model.
        stop: Asks for an early end.
        run: How often checkpoints are written, and how many stay.
        evaluation: How often the model is evaluated, and when that ends the run.
        evaluates: There are rows to evaluate on.
        clock: Seconds since the run began.
    """

    def __init__(
        self,
        rows: Rows,
        best: Best,
        stop: Stop,
        run: TuneRunConfig,
        evaluation: TuneEvalConfig,
        *,
        evaluates: bool,
        clock: Callable[[], float],
    ) -> None:
        self.rows, self._best, self._stop, self._run = rows, best, stop, run
        self._eval_every, self._evaluates, self._clock = evaluation.eval_every, evaluates, clock
        self._patience = evaluation.early_stopping
        self.trainer: Any = None
        self.stopped = False
        self.settled = False  # early stopping ended the run

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> Any:
        """Decide what follows the step."""
        last = state.global_step >= state.max_steps
        control.should_log = True
        if self._evaluates:
            control.should_evaluate = last or bool(self._eval_every and state.global_step % self._eval_every == 0)
        if self._run.save_every and (last or state.global_step % self._run.save_every == 0):
            control.should_save = True
        if self._stop.agreed() and not last:
            self.stopped = control.should_training_stop = control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Seal the checkpoint with a manifest when all ranks have written their parts of it; only then remove older ones."""
        self.rows.flush()
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir)
            write_manifest(folder / f"{PREFIX}{state.global_step}")
            for path in checkpoints_in(folder)[: -self._run.keep_checkpoints]:
                remove_directory(path)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **rest: Any) -> None:
        """Take the metrics of a step or of an evaluation."""
        if not logs or "train_loss" in logs:  # the last: those of the whole run
            return
        if any(name.startswith("eval_") for name in logs):
            metrics = self.rows.measured(state.global_step, logs)
            if (value := self._best.better(metrics)) is not None:
                self.rows.note(**{"eval/best": value, "eval/best_step": float(state.global_step)})
                save_model(self.trainer, self._best.folder)
            elif self._patience and self._best.since >= self._patience and state.global_step < state.max_steps:
                self.settled = control.should_training_stop = True
                control.should_save = bool(self._run.save_every)
        else:
            self.rows.trained(state.global_step, logs, self._clock())
