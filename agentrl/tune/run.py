"""One run from its settings to its result: in this process, or on ranks that are processes started here."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.methods import METHODS
from agentrl.config.plugins import plugins
from agentrl.core.errors import ClusterError, ConfigError
from agentrl.core.exit_codes import INTERRUPTED
from agentrl.core.fingerprints import ACCEPT, fingerprints_of
from agentrl.core.plugins import copy_plugins
from agentrl.core.process import refuse_import
from agentrl.core.settings import flag, listed
from agentrl.learner.backends import DEEPSPEED
from agentrl.resolve.inputs import read_files
from agentrl.resolve.ranks import is_first, is_started
from agentrl.resolve.tune import TunePlan, load_given
from agentrl.track.text import counted
from agentrl.tune import launch
from agentrl.tune.data import Examples, data_text, epoch_size, read_examples
from agentrl.tune.directory import TuneResult, open_directory
from agentrl.tune.prepare import num_steps, prepare
from agentrl.tune.row_table import Prepared

if TYPE_CHECKING:
    from agentrl.tune.follow import Stop

REFUSED = 2
"""Exit code of a command that asked for what cannot be done."""


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
    return run(load_given(METHODS[method], settings), stop)


def run(plan: TunePlan, stop: Stop | None = None) -> TuneResult:
    """Train as the plan says; on return everything is saved.

    Raises:
        ConfigError: If a row or a model is wrong.
        AgentRLError: If the run failed.
    """
    refuse_import()
    launch.follow_launcher()
    with plan.in_directory() as placed:
        starts = not is_started() and (plan.ranks.num_ranks > 1 or plan.on_ray)
        return _run_ranks(placed, stop) if starts else _run(placed, stop)


def _run(plan: TunePlan, stop: Stop | None) -> TuneResult:
    started_s = time.monotonic()
    examples = read(plan)
    directory = open_directory(plan.run_dir, plan.settings.run.resume, plan.to_json())
    if is_first():
        copy_plugins((spec for _, spec in plugins(plan.settings)), plan.run_dir)
    prepared = encoded(plan, examples)
    directory.check_inputs(inputs_of(plan, prepared.fingerprint), accepts_changes=plan.accepts_changes)
    learner = plan.learner
    together = {"sequence_parallel": learner.sequence_parallel, "tensor_parallel": learner.learner_tensor_parallel}
    with launch.joined(plan.ranks.device, deepspeed=learner.learner_backend == DEEPSPEED, **together) as ranks:
        # Imports DeepSpeed, which reads the kind of device that `joined` has set.
        from agentrl.tune.loop import train

        return train(plan, prepared, directory, stop, started_s, ranks)


def read(plan: TunePlan) -> Examples:
    """Read and check the rows of a run, then its models.

    Raises:
        ConfigError: If a row or a model is wrong.
    """
    settings = plan.settings
    examples = read_examples(settings.data, plan.method.form, settings.run.seed, settings.eval)
    plan.check_models()
    return examples


def encoded(plan: TunePlan, examples: Examples) -> Prepared:
    """Make token ids of the examples of a run; see `agentrl.tune.prepare.prepare`."""
    settings = plan.settings
    prepared = prepare(examples, settings.data, settings.model, settings.images, settings.method)
    return replace(prepared, notes=(*plan.notes, *prepared.notes))


def inputs_of(plan: TunePlan, rows: str) -> dict[str, Any]:
    """Return what a run reads, in JSON's own types; `rows` is the hash of its rows. See `RunDirectory.check_inputs`."""
    data, files = plan.settings.data, dict[str, Mapping[str, str]]()
    for name in ("data", "eval_data"):
        for place in listed(getattr(data, name)):
            path = Path(place).expanduser()
            if path.exists():
                folder, pattern = (path, "*") if path.is_dir() else (path.parent, escape(path.name))
                files[f"{flag(name)} {place}"] = fingerprints_of(folder, [pattern])
    return {"rows": rows, "data": files, "files": read_files(plan.inputs)}


def _run_ranks(plan: TunePlan, stop: Stop | None) -> TuneResult:
    """Run ``--num-ranks`` processes, of the same command on the settings of the run's directory, or on a cluster.

    Raises:
        ClusterError: If one failed.
        SystemExit: With code 2 if they refused the request, which they have said.
        AgentRLError: That of a rank on a cluster.
    """
    # A row that is wrong is refused once here, and not by every rank.
    read(plan)
    own, path = plan.settings.run, plan.run_dir
    open_directory(path, own.resume, plan.to_json())
    if plan.on_ray:
        from agentrl.tune.ray_ranks import run_on_cluster

        run_on_cluster(run, plan, stop)
        return TuneResult.read(path)
    words = [sys.executable, "-m", "agentrl", plan.method.command, "--config", str(path / "config.json"), "--run-dir", str(path)]
    words += ["--resume", own.resume] if own.resume else []
    words += ["--debug"] if own.debug else []
    words += [ACCEPT] if plan.accepts_changes else []
    code = launch.run_ranks(words, plan.ranks.num_ranks)
    if code == REFUSED:
        raise SystemExit(code)
    if code not in (0, INTERRUPTED):
        raise ClusterError(f"a rank of {path} ended with code {code}; what it said is above")
    return TuneResult.read(path)


def preview(plan: TunePlan) -> list[str]:
    """Return the lines of ``--dry-run`` for a person: the size of the run, what is cut, and three rows as they are trained.

    Raises:
        ConfigError: If a row or a model is wrong.
    """
    prepared = encoded(plan, read(plan))
    run, data, optim = plan.settings.run, plan.settings.data, plan.settings.optim
    steps = num_steps(run, optim.batch_size, epoch_size(prepared.sizes, data, run.seed))
    at_once = f"{plan.learner.micro_batch_tokens} tokens at once on a rank"
    lines = [f"{counted(steps, 'step')} of {counted(optim.batch_size, 'row')}, {at_once}, learning rate {optim.learning_rate:g}"]
    lines += [*prepared.notes, f"to train on: {data_text(prepared.counts['train'], data.max_length)}"]
    if prepared.held_out:
        lines += [f"to evaluate on: {data_text(prepared.counts['eval'], data.max_length)}"]
    for number, sample in enumerate(prepared.samples, start=1):
        lines += [f"row {number}, trained is what stands in [[ ]]:", *(f"    {line}" for line in sample.split("\n"))]
    return lines
