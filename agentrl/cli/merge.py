"""``agentrl merge``: an adapter into its base model, or the weighted average of several models."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.cli.words import command_of, read, word
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MergeArgs:
    """Merge an adapter into its base model, or average several models of one architecture."""

    source: tuple[Path, ...] = ()
    """One directory with an adapter, or two or more with whole models."""
    output: Path | None = None
    """Directory to write; it must not exist yet, or be empty."""
    base: str = ""
    """Model to merge the adapter into, a directory or hub name. Empty: the one that the adapter names."""
    weights: tuple[float, ...] = ()
    """Weight of each model in the average; they are divided by their sum. Empty: all the same."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights of a model with an adapter merged in. ``auto``: that of the base."""
    trust_remote_code: bool = False
    """Allow the base's own Python code to run."""


MERGE = command_of("merge", MergeArgs, word("source", "SOURCE"))


def main(words: list[str]) -> int:
    """Run the command with the words after ``merge``."""
    args: MergeArgs = read(MERGE, words)
    sources = [path.expanduser() for path in args.source]
    target = _target(args)
    if len(sources) == 1:
        return _merge(args, sources[0], target)
    _check_average(args, sources)
    from agentrl.learner.merge import average_models

    weights = args.weights or (1.0,) * len(sources)
    number = average_models(sources, weights, target)
    sys.stdout.write(f"{args.output}: the average of {len(sources)} models, {number:,} parameters\n")
    return 0


def _target(args: MergeArgs) -> Path:
    if args.output is None:
        raise ConfigError("--output", None, "is not given", "Name the directory to write.")
    target = args.output.expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError("--output", str(args.output), "exists", "Name a new directory.")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _merge(args: MergeArgs, source: Path, target: Path) -> int:
    if not holds_adapter(source):
        problem = (
            "holds a whole model, and there is nothing to average it with" if (source / "config.json").is_file() else "holds no adapter"
        )
        raise ConfigError("SOURCE", str(source), problem, "Name a directory with an adapter, or several with models.")
    if args.weights:
        raise ConfigError("--weights", args.weights, "has no effect on an adapter", "Leave it out.")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported
    from agentrl.learner.merge import merge_into_base

    number = merge_into_base(source, target, base=args.base, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    sys.stdout.write(f"{args.output}: {source} merged into its base, {number:,} parameters\n")
    return 0


def _check_average(args: MergeArgs, sources: list[Path]) -> None:
    for flag, value, is_set in (("--base", args.base, bool(args.base)), ("--dtype", args.dtype, args.dtype != "auto")):
        if is_set:
            raise ConfigError(flag, value, "has no effect on an average", "Leave it out.")
    for source in sources:
        if holds_adapter(source):
            problem = "holds an adapter, and whole models are averaged"
            raise ConfigError("SOURCE", str(source), problem, f"Merge it first: agentrl merge {source} --output OUT.")
        if not (source / "config.json").is_file() or not list(source.glob("*.safetensors")):
            raise ConfigError("SOURCE", str(source), "holds no model in safetensors files", "Name a Hugging Face directory.")
    # Written so that a sum that is not a number is refused too.
    if args.weights and (len(args.weights) != len(sources) or not sum(args.weights) > 0):
        problem = f"must be {len(sources)} numbers, one for each model, with a sum above 0"
        raise ConfigError("--weights", args.weights, problem, "Leave it out for equal weights.")
