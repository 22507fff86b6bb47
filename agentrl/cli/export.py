"""``agentrl export``: the model of a checkpoint as a Hugging Face directory, without Ray, vLLM or a GPU; or episodes for other viewers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.cli.words import command_of, read, word
from agentrl.config.mapping import read_file, read_saved
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.files import check_directory
from agentrl.core.manifest import MANIFEST
from agentrl.flow.checkpoint import FOLDER, LEARNER, read_checkpoint
from agentrl.resolve.parts import learner_plan

if TYPE_CHECKING:
    from agentrl.learner.settings import LearnerSettings


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Write the model of a checkpoint as a Hugging Face directory, or the recorded episodes for another viewer."""

    source: Path = Path()
    """Directory of a run, or of one of its checkpoints."""
    target: Path | None = None
    """Directory to write; it must not exist yet, or be empty. With ``--merge``, ``RUN/merged`` by default. With ``--inspect``
    or ``--otel``, the file to write."""
    inspect: bool = False
    """Write the recorded episodes as a log of Inspect, a .json file."""
    otel: bool = False
    """Write the recorded episodes as OpenTelemetry spans, a .jsonl file in OTLP's form."""
    step: int | None = None
    """Take the checkpoint of this step; by default the newest."""
    ema: bool = False
    """Write the moving average instead of the weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type to write the weights in; the checkpoint has them in float32, whatever they were trained in."""
    merge: bool = False
    """Write the whole model with the adapter merged in, instead of the adapter of a run with ``--lora-rank``."""
    model: str = ""
    """Path of the initial model, if the run's own setting no longer leads to it."""


EXPORT = command_of("export", ExportArgs, word("source", "RUN"), word("target", "OUT", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``export``."""
    args: ExportArgs = read(EXPORT, words)
    if not args.source.expanduser().is_dir():
        raise ConfigError("RUN", str(args.source), "there is no such directory", "Name a run's directory, as printed at its end.")
    if args.inspect or args.otel:
        return _export_episodes(args)
    if args.target is None and not args.merge:
        return _say_where(args.source.expanduser())
    target = (args.target or args.source / MERGED).expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError("OUT", str(args.target), "exists", "Name a new directory.")
    if args.merge and (adapter := _saved_adapter(args)) is not None:
        return _merge_saved(args, adapter, target)
    checkpoint = find_checkpoint(args.source.expanduser(), args.step)
    check_directory(checkpoint)  # an older one is not taken in the place of a damaged one unasked
    progress, saved = read_checkpoint(checkpoint)
    config = read_saved(saved, str(checkpoint / "config.json"))
    if args.merge and not config.lora.lora_rank:
        raise ConfigError("--merge", True, "the run trained the model itself, there is no adapter", "Leave it out.")
    settings = _settings(learner_plan(config, "cpu"), args)
    # Imports torch, for which a wrong request should not wait.
    from agentrl.learner.export import export_checkpoint

    target.parent.mkdir(parents=True, exist_ok=True)
    number = export_checkpoint(checkpoint / LEARNER, settings, target, average=args.ema, dtype=args.dtype, merge=args.merge)
    what = "moving average" if args.ema else "weights"
    sys.stdout.write(f"{args.target or target}: {what} after step {progress.step}, {number:,} parameters in {args.dtype}\n")
    return 0


def _export_episodes(args: ExportArgs) -> int:
    from agentrl.inspect.reader import RunReader
    from agentrl.inspect.telemetry import export_inspect, export_spans

    if args.inspect and args.otel:
        raise ConfigError("--otel", True, "is another form than --inspect", "Give one of them.")
    if args.target is None:
        raise ConfigError("OUT", None, "is not given", f"Name the file: `agentrl export {args.source} episodes.json{'l' * args.otel}`.")
    export = export_inspect if args.inspect else export_spans
    count = export(RunReader(args.source.expanduser()), args.target.expanduser())
    sys.stdout.write(f"{args.target}: {count} {'samples of Inspect' if args.inspect else 'traces'}\n")
    return 0


def _settings(plan: LearnerSettings, args: ExportArgs) -> LearnerSettings:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
    return replace(plan, model=args.model or plan.model)


MERGED = "merged"


def _saved_adapter(args: ExportArgs) -> Path | None:
    """Return the adapter that is meant if it is not in a checkpoint: RUN itself, as ``runs/sums/best``, or what a run left at its end."""
    source = args.source.expanduser()
    if holds_adapter(source):
        return source
    last = source / ("model-ema" if args.ema else "model")
    return last if args.step is None and not (source / FOLDER).is_dir() and holds_adapter(last) else None


def _merge_saved(args: ExportArgs, saved: Path, target: Path) -> int:
    """Merge an adapter that a run saved beside its settings into the initial model."""
    path = saved.absolute().with_name("config.json")
    settings = _settings(learner_plan(read_saved(read_file(path), str(path)), "cpu"), args)
    from agentrl.learner.merge import merge_into_base

    number = merge_into_base(saved, target, base=settings.model, dtype=args.dtype, trust_remote_code=settings.trust_remote_code)
    sys.stdout.write(f"{args.target or target}: {saved.name} merged into the model, {number:,} parameters in {args.dtype}\n")
    return 0


def _say_where(run: Path) -> int:
    """Answer a call without OUT: name the model that the run saved at its end.

    Raises:
        ConfigError: If it saved none.
    """
    if holds_adapter(run / "model"):
        sys.stdout.write(f"{run / 'model'} holds the adapter of the last step; add --merge for the whole model with it merged in\n")
        return 0
    if not (run / "model" / "config.json").is_file():
        raise ConfigError("OUT", None, "is not given", f"Write `agentrl export {run} DIRECTORY`.")
    sys.stdout.write(f"{run / 'model'} is a Hugging Face directory already, with the weights of the last step\n")
    return 0


def find_checkpoint(source: Path, step: int | None) -> Path:
    """Return the checkpoint that is meant: `source` itself, or that of a step of the run `source`, by default the newest.

    Raises:
        ConfigError: If there is none.
    """
    if (source / MANIFEST).is_file() and (source / LEARNER).is_dir():
        if step is not None:
            raise ConfigError("--step", step, f"{source} is a checkpoint already", "Leave --step out, or name the run.")
        return source
    folders = sorted((source / FOLDER).glob("step-*"))
    found = {int(number): path for path in folders if (number := path.name.removeprefix("step-")).isdecimal()}
    if not found:
        remedy = "Name a run's directory, started with --save-every N, or one of its checkpoints."
        if (source / "model" / "config.json").is_file():
            remedy = f"{source / 'model'} is a Hugging Face directory already: copy it."
        raise ConfigError("RUN", str(source), "holds no checkpoint", remedy)
    chosen = max(found) if step is None else step
    if chosen not in found:
        raise ConfigError("--step", step, "has no checkpoint", f"There are those of the steps {', '.join(map(str, found))}.")
    return found[chosen]
