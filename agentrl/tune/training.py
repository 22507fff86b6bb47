"""The heavy half of a run: its models loaded, trained, saved and summed up."""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable

import transformers
from rich.console import Console

from agentrl.core.adapter_files import holds_adapter
from agentrl.core.callbacks import Callback, RunBegin, RunEnd
from agentrl.core.paths import shown_path
from agentrl.learner.ranks import Ranks
from agentrl.resolve.ranks import is_first
from agentrl.resolve.tune import TunePlan
from agentrl.track.console import make_display, open_console
from agentrl.track.display import loss_form
from agentrl.track.recorders import LaunchRecorder
from agentrl.track.sinks import open_metric_sinks
from agentrl.track.summary import TuneSummary, print_summary, write_summary
from agentrl.tune.data import data_text, drawing_order, epoch_size
from agentrl.tune.directory import RunDirectory, TuneResult
from agentrl.tune.follow import Best, Rows, Stop
from agentrl.tune.loop import Loop, save_model, start
from agentrl.tune.prepare import Prepared, make_tokenizer, num_steps
from agentrl.tune.row_table import Drawn
from agentrl.tune.samples import rows_to_record

_log = logging.getLogger(__name__)

SHOWN = 3000
"""Characters up to which all samples are shown before training begins; of longer ones the first, whole."""


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
        count = settings.run.record_rows
        recorded = rows_to_record(prepared, order, count) if count else ()
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
