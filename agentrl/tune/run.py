"""One run from its settings to its result: in this process, or on ranks that are processes started here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import ClusterError, ConfigError
from agentrl.core.paths import absolute_path
from agentrl.core.process import refuse_import
from agentrl.tune import launch
from agentrl.tune.data import read_examples
from agentrl.tune.directory import TuneResult, open_directory
from agentrl.tune.load import load_given
from agentrl.tune.methods import METHODS, Method
from agentrl.tune.prepare import check_models, num_steps, prepare
from agentrl.tune.settings import TuneConfig
from agentrl.tune.summary import data_text

if TYPE_CHECKING:
    from agentrl.tune.follow import Stop


def tune(method: str, *, stop: Stop | None = None, **settings: Any) -> TuneResult:
    """Train by one of the methods, as the command of its name does.

    Args:
        method: ``sft``, ``reward-model``, ``process-reward-model``, ``dpo``, ``kto``, ``orpo`` or ``distill``.
        stop: Asks for an early end from another thread.
        **settings: The flags of the command: ``model="..."``, ``data="pairs.jsonl"``, ``num_steps=20``.

    Returns:
        The directory of the run, its model and its metrics.

    Raises:
        ConfigError: If a setting or a row is wrong; nothing heavy is imported by then.
    """
    if method not in METHODS:
        raise ConfigError("method", method, "is not a method", f"Methods: {', '.join(METHODS)}.")
    return run(METHODS[method], load_given(METHODS[method], settings), stop)


def run(method: Method, config: TuneConfig, stop: Stop | None = None) -> TuneResult:
    """Train as `config` says; on return everything is saved.

    Raises:
        ConfigError: If a row or a model is wrong.
        AgentRLError: If the run failed.
    """
    refuse_import()
    launch.follow_launcher()
    with in_directory(method, config) as placed:
        return _run(method, placed, stop)


def _run(method: Method, config: TuneConfig, stop: Stop | None) -> TuneResult:
    if config.run.num_ranks > 1 and not launch.is_rank():
        return _run_ranks(method, config)
    started_s = time.monotonic()
    examples = read_examples(config, method.form)
    check_models(config)
    directory = open_directory(method, config)
    prepared = prepare(config, examples)
    directory.check_data(prepared.fingerprint)
    with launch.joined(config):
        from agentrl.tune.training import train

        return train(method, config, prepared, directory, stop, started_s)


def _run_ranks(method: Method, config: TuneConfig) -> TuneResult:
    """Run ``--num-ranks`` processes of the same command on the settings of the run's directory.

    Raises:
        ClusterError: If one failed.
        SystemExit: With code 2 if they refused the request, which they have said.
    """
    read_examples(config, method.form)
    check_models(config)
    path = open_directory(method, config).path
    words = [sys.executable, "-m", "agentrl", method.command, "--config", str(path / "config.json"), "--run-dir", str(path)]
    words += ["--resume", config.run.resume] if config.run.resume else []
    words += ["--debug"] if config.run.debug else []
    code = launch.run_ranks(words, config.run.num_ranks)
    if code == REFUSED:
        raise SystemExit(code)
    if code not in (0, launch.INTERRUPTED):
        raise ClusterError(f"a rank of {path} ended with code {code}; what it said is above")
    return TuneResult.read(path)


REFUSED = 2


@contextmanager
def in_directory(method: Method, config: TuneConfig) -> Iterator[TuneConfig]:
    """Hold the directory of the run, the resumed one or a new one, and yield the settings that name it; one rank holds it for all.

    Raises:
        ConfigError: If it cannot be made, or another process writes to it.
    """
    run = config.run
    resumed = run.resume not in ("", "auto")
    path = Path(run.resume) if resumed else run.run_dir
    if path is None:
        holding: AbstractContextManager[Path] = held_new_directory(Path("runs") / f"{method.command}-{datetime.now():%Y%m%d-%H%M%S}")
    elif launch.holds_directory():
        holding = held_directory(path, "--resume" if resumed else "--run-dir")
    else:
        holding = nullcontext(absolute_path(path))
    with holding as held:
        yield replace(config, run=replace(run, run_dir=held))


def preview(method: Method, config: TuneConfig) -> list[str]:
    """Return the lines of ``--dry-run`` for a person: the size of the run, what is cut, and three rows as they are trained.

    Raises:
        ConfigError: If a row or a model is wrong.
    """
    examples = read_examples(config, method.form)
    check_models(config)
    prepared = prepare(config, examples)
    steps = num_steps(config, [len(part) for part in prepared.parts])
    lines = [f"{steps} steps of {config.optim.batch_size} rows, learning rate {config.optim.learning_rate:g}"]
    lines += [*prepared.notes, f"to train on: {data_text(prepared.counts['train'], config.data.max_length)}"]
    if prepared.held_out:
        lines += [f"to evaluate on: {data_text(prepared.counts['eval'], config.data.max_length)}"]
    for number, sample in enumerate(prepared.samples, start=1):
        lines += [f"row {number}, trained is what stands in [[ ]]:", *(f"    {line}" for line in sample.split("\n"))]
    return lines
