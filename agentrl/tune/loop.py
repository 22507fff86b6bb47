"""A run on the learner: its models loaded, trained step by step with evaluations and checkpoints, saved and summed up."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from safetensors import SafetensorError

from agentrl.core.adapter_files import holds_adapter
from agentrl.core.callbacks import Callback, RunBegin, RunEnd
from agentrl.core.errors import ConfigError
from agentrl.core.files import commit_directory, remove_directory, temporary_directory, temporary_name
from agentrl.core.operating_system import peak_memory_gib
from agentrl.core.paths import shown_path
from agentrl.learner.checkpoint import load_checkpoint, save_checkpoint
from agentrl.learner.ranks import Ranks
from agentrl.learner.row_objective import LabelledRows
from agentrl.learner.state import LearnerState, load_state
from agentrl.resolve.ranks import is_first
from agentrl.resolve.tune import TunePlan
from agentrl.track.console import make_display, open_console
from agentrl.track.display import loss_form
from agentrl.track.recorders import LaunchRecorder
from agentrl.track.sinks import open_metric_sinks
from agentrl.track.summary import TuneSummary, print_summary, write_summary
from agentrl.tune.data import data_text, drawing_order, epoch_size
from agentrl.tune.directory import CHECKPOINTS, PREFIX, RunDirectory, TuneResult, checkpoints_in
from agentrl.tune.follow import Best, Rows, Stop
from agentrl.tune.learner_rows import RowMaker, RowRecorder, chosen_rows, learner_settings
from agentrl.tune.prepare import image_reader, make_tokenizer, num_steps
from agentrl.tune.row_table import Drawn, Prepared, Row

SHOWN = 3000
"""Characters up to which all samples are shown before training begins; of longer ones the first, whole."""


class Loop:
    """Trains by the settings of a run, and passes its metrics on.

    Args:
        plan: The run.
        prepared: Its rows.
        directory: Its directory, and where it goes on.
        state: Models of this rank.
        rows: Takes the metrics.
        best: Keeps the best model.
        stop: Asks for an early end.
        clock: Returns seconds since the run began.
        recorded: Rows whose figures are recorded, each with the name of its part.
    """

    def __init__(
        self,
        plan: TunePlan,
        prepared: Prepared,
        directory: RunDirectory,
        state: LearnerState,
        rows: Rows,
        best: Best,
        stop: Stop,
        clock: Callable[[], float],
        recorded: Sequence[tuple[str, Row]] = (),
    ) -> None:
        self._run, self._eval, self._batch_size = plan.settings.run, plan.settings.eval, plan.settings.optim.batch_size
        self._held_out, self._directory, self._state = prepared.held_out, directory, state
        self._rows, self._best, self._stop, self._clock = rows, best, stop, clock
        self._made = RowMaker(plan.method.command, image_reader(plan.settings.model, plan.settings.images))
        self._recorder = RowRecorder(state, self._made, recorded, directory, self._batch_size) if recorded else None
        self._tokens = float(directory.rows[-1].get("tokens", 0.0)) if directory.rows else 0.0

    def train(self, drawn: Sequence[Row], steps: int) -> str:
        """Train on rows in the order in which they are drawn, up to a number of steps.

        Returns:
            ``finished``, ``interrupted``, or ``settled`` where the last evaluations were not better.
        """
        if self._held_out and not self._directory.step:
            self._evaluate(0)
        if self._recorder is not None:
            self._recorder.begin()
        # A run that was killed after its last checkpoint has settled already.
        status = "settled" if self._has_settled and self._directory.step < steps else None
        step = self._directory.step - 1
        for step in range(self._directory.step, 0 if status else steps):
            rows = self._made(drawn[step * self._batch_size : (step + 1) * self._batch_size])
            metrics = self._state.train_rows(step, rows) | _sizes(rows)
            self._tokens += rows.num_tokens
            self._rows.trained(step + 1, metrics, tokens=self._tokens, seconds=self._clock())
            if (status := self._follow(step + 1, last=step + 1 == steps)) is not None:
                break
        self._rows.flush()
        if self._recorder is not None:
            self._recorder.end(step + 1)
        return status or "finished"

    def _follow(self, step: int, *, last: bool) -> str | None:
        """Do what follows a step; return how the run ends, `None` if it goes on."""
        every, saves = self._eval.eval_every, self._run.save_every
        status = None
        if self._held_out and (last or (every and step % every == 0)):
            self._evaluate(step)
            if self._has_settled and not last:
                status = "settled"
        if self._stop.agreed(self._state.ranks) and not last:
            status = "interrupted"
        if status == "interrupted" or (saves and (last or status or step % saves == 0)):
            self._rows.flush()
            self._save_checkpoint(step)
        return status

    @property
    def _has_settled(self) -> bool:
        return 0 < self._eval.early_stopping <= self._best.since

    def _evaluate(self, step: int) -> None:
        begin = self._clock()
        held_out, size = self._held_out, self._batch_size
        found = self._state.evaluate_rows(step, (self._made(held_out[at : at + size]) for at in range(0, len(held_out), size)))
        if (value := self._best.better(self._rows.measured(step, found, seconds=self._clock() - begin))) is not None:
            self._rows.note(**{"eval/best": value, "eval/best_step": float(step)})
            save_model(self._state, self._best.folder)

    def _save_checkpoint(self, step: int) -> None:
        """Write a checkpoint, which has its name when all ranks have written their parts of it; only then remove older ones."""
        folder, ranks = self._directory.path / CHECKPOINTS, self._state.ranks
        path = folder / f"{PREFIX}{step}"
        if ranks.first:
            temporary_directory(path)
        ranks.barrier()
        save_checkpoint(self._state, temporary_name(path), step)
        if ranks.first:
            commit_directory(temporary_name(path), path)
            for old in checkpoints_in(folder)[: -self._run.keep_checkpoints]:
                remove_directory(old)
        ranks.barrier()


def _sizes(rows: LabelledRows) -> dict[str, float]:
    """Return the sizes of a step, and the most memory that this process has had."""
    sizes = {"rows": rows.num_rows, "tokens/rows": rows.num_tokens, "tokens/trained": rows.num_actions}
    return {name: float(value) for name, value in sizes.items()} | {"memory/process_gib": peak_memory_gib()}


def save_model(state: LearnerState, folder: Path) -> None:
    """Write the model with its tokenizer into a folder, whole or not at all; every rank calls it."""
    state.save(str(folder))
    if state.ranks.first and holds_adapter(folder) and state.policy.can_generate():  # an adapter has the weights alone
        state.policy.generation_config.save_pretrained(folder)


def start(plan: TunePlan, prepared: Prepared, directory: RunDirectory, steps: int, ranks: Ranks, tokenizer: Any) -> LearnerState:
    """Load the models of a run, as they were at its last checkpoint if it goes on.

    Raises:
        ConfigError: If the model cannot be loaded for the method.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    settings = learner_settings(plan, steps)
    try:
        state = load_state(settings, ranks, tokenizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"agentrl {plan.method.command}", settings.model, f"cannot be trained: {reason}", "See --debug.") from error
    model = state.policy
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    if (separator := getattr(plan.settings.method, "step_separator", None)) is not None:
        model.config.step_separator = separator
    # Before training, so that the best model holds these tokens too.
    record_ends(model, tokenizer, prepared.ends)
    if directory.checkpoint is not None:
        load_checkpoint(state, directory.checkpoint)
    return state


def record_ends(model: Any, tokenizer: Any, ends: Sequence[int]) -> None:
    """Let generation stop at the tokens that end trained answers; the most frequent becomes the tokenizer's own.

    A tokenizer whose end token ends answers, or is written by its chat template, keeps it.
    """
    if not ends or not model.can_generate():
        return
    if tokenizer.eos_token_id not in ends and "eos_token" not in str(tokenizer.chat_template or ""):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    known = model.generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *known]))


def train(plan: TunePlan, prepared: Prepared, directory: RunDirectory, stop: Stop | None, started_s: float, ranks: Ranks) -> TuneResult:
    """Train on prepared rows as one of the ranks, of which the first writes ``summary.json``, and return the result.

    Raises:
        ConfigError: If the model cannot be trained so.
    """
    _quiet()
    method, settings = plan.method, plan.settings
    epoch_rows = epoch_size(prepared.sizes, settings.data, settings.run.seed)
    steps = num_steps(settings.run, settings.optim.batch_size, epoch_rows)
    console = open_console()
    summary, sinks, display = TuneSummary(method.command, method.shown), list[Callback](), None
    for row in directory.rows:
        summary.add(row)
    if is_first():
        _show_data(prepared, settings.data.max_length, directory, console)
        display = make_display(
            steps, title=_title(method.command, settings.model.model, settings.data.data), console=console, form=loss_form(method.shown)
        )
        display.on_stage("loading the model")
        launched = LaunchRecorder(directory.path / "launches.jsonl")
        sinks = [launched, *open_metric_sinks(directory.path, settings.track, ("step", "loss", "learning_rate", "epoch")), summary, display]
        for sink in sinks:
            sink.on_run_begin(
                RunBegin(config=dataclasses.asdict(settings), run_dir=directory.path, resumed=directory.step > 0, step=directory.step)
            )
        directory.tidy()
    status = "failed"
    try:
        with (stop or Stop()).on_signals() as asked:
            rows = Rows(method, sinks, epoch_rows=epoch_rows, batch_size=settings.optim.batch_size)
            best = Best(settings.eval.keep_best, directory.path / "best", directory.rows)
            following = rows, best, asked, lambda: time.monotonic() - started_s
            stage = (lambda text: None) if display is None else display.on_stage
            status = _train(plan, prepared, directory, steps, ranks, following, stage)
    finally:
        found = summary.build(run_dir=directory.path, wall_s=time.monotonic() - started_s, status=status, data=prepared.counts)
        if is_first():
            write_summary(found, directory.path / "summary.json")
        for sink in reversed(sinks):
            sink.on_run_end(RunEnd(status=status, summary=found))
        if is_first() and status != "failed":
            print_summary(found, console=console, rewards=summary.losses, commands=_next(method.command, directory, status))
    model = directory.path / "model"
    return TuneResult(status=status, run_dir=directory.path, model=model, steps=found["steps"], metrics=summary.latest, summary=found)


def _train(
    plan: TunePlan,
    prepared: Prepared,
    directory: RunDirectory,
    steps: int,
    ranks: Ranks,
    following: tuple[Rows, Best, Stop, Callable[[], float]],
    stage: Callable[[str], None],
) -> str:
    """Load the models, train, and save the model; return ``finished`` or ``interrupted``."""
    settings = plan.settings
    order = drawing_order(prepared.sizes, steps * settings.optim.batch_size, settings.data, settings.run.seed)
    state = start(plan, prepared, directory, steps, ranks, make_tokenizer(settings.model, settings.data.eos_token))
    try:
        stage("first step")
        recorded = chosen_rows(Drawn(prepared.parts, list(dict.fromkeys(order))), prepared.held_out, settings.run.record_rows)
        status = Loop(plan, prepared, directory, state, *following, recorded).train(Drawn(prepared.parts, order), steps)
        if status == "interrupted":
            return status
        if status == "settled":
            stage(f"ending, because the last {settings.eval.early_stopping} evaluations have no better {settings.eval.keep_best}")
        save_model(state, directory.path / "model")
        return "finished"
    finally:
        state.models.policy.close()


def _quiet() -> None:
    """Leave the terminal to our display."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|transformers|accelerate|peft|deepspeed")
    for name in ("accelerate", "deepspeed", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _show_data(prepared: Prepared, max_length: int, directory: RunDirectory, console: Console) -> None:
    """Say what became of the rows, and write a few of them as text."""
    lines = [*prepared.notes, f"data: {data_text(prepared.counts['train'], max_length)}"]
    if prepared.held_out:
        lines.append(f"held out: {data_text(prepared.counts['eval'], max_length)}")
    samples = "\n\n".join(prepared.samples)
    (directory.path / "samples.txt").write_text(samples + "\n", encoding="utf-8")
    shown = [sample for number, sample in enumerate(prepared.samples) if not number or len(samples) <= SHOWN]
    lines += ["trained is what stands in [[ ]]:", *(f"  {line}" for sample in shown for line in sample.split("\n") if line)]
    if len(shown) < len(prepared.samples):
        lines.append(f"more rows: {directory.path / 'samples.txt'}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _title(command: str, model: str, data: str) -> str:
    return f"{command} of {model.rstrip('/').rpartition('/')[2] or 'the bundled tiny model'} on {data}"


def _next(command: str, directory: RunDirectory, status: str) -> list[str]:
    if status != "finished":
        return [f"agentrl {command} --resume {shown_path(directory.path)}"]
    if holds_adapter(directory.path / "model"):
        return [f"agentrl merge {shown_path(directory.path / 'model')}"]
    return []
