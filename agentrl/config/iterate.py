"""The settings of ``agentrl iterate``: how many rounds, and settings of the phases of a round, which are commands of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from agentrl.config.load import Command, load, load_given, take_config_flag
from agentrl.config.mapping import read_file
from agentrl.config.words import Word
from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count, CountOrZero, ResumeMayChange, flag

PHASES = ("sample", "train", "eval")
OWNED: Mapping[str, tuple[str, ...]] = {
    "sample": ("model", "agent", "output", "resume", "select", "seed"),
    "train": ("model", "data", "run_dir", "resume", "seed"),
    "eval": ("model", "agent", "output", "run", "baseline"),
}
"""Settings of each phase that the rounds decide."""


@dataclass(frozen=True, kw_only=True)
class IterateOptions:
    """The method, the environment, the rounds, and the place of the results."""

    method: Literal["dpo", "sft"] = "dpo"
    """``dpo`` trains on pairs of the best and the worst answers, ``sft`` on the best; it stands first, without its flag."""
    agent: str = ""
    """Environment or reward, as for ``agentrl train``; it may stand behind the method."""
    model: str = ""
    """Model to begin with: a directory or hub name. Empty: the tiny chat model that ships with agentrl."""
    rounds: Annotated[Count, ResumeMayChange] = 3
    """Rounds."""
    seed: CountOrZero = 0
    """Seed; each round samples and trains with one of its own."""
    run_dir: Annotated[Path | None, ResumeMayChange] = None
    """Directory of all rounds. Default: ``runs/iterate-<environment>-<date>-<time>``."""
    resume: Annotated[bool, ResumeMayChange] = False
    """Go on in ``--run-dir`` where an earlier command was ended."""
    debug: Annotated[bool, ResumeMayChange] = False
    """Show tracebacks."""


@dataclass(frozen=True, kw_only=True)
class IterateConfig:
    """Sections of ``agentrl iterate``, and what stands behind the names of its phases.

    Attributes:
        iterate: The settings.
        phases: Phase -> words for the command that it runs.
    """

    iterate: IterateOptions = field(default_factory=IterateOptions)
    phases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


ITERATE = Command(
    "iterate",
    IterateConfig,
    "Sample, score, train, evaluate, and again, as one run that can be resumed: iterative DPO (dpo) or rejection sampling with "
    "fine-tuning (sft, RAFT). Prefix a flag with the name of its phase: --sample.n-samples-per-prompt 8 --train.num-steps 30 "
    "--eval.eval-size 64, or use the tables [sample], [train] and [eval] of --config FILE; see agentrl sample, dpo, sft and eval --help.",
    words=(
        Word(setting="method", label="METHOD", doc="dpo or sft, the same as --method."),
        Word(setting="agent", label="ENV", doc="Environment or reward, the same as --agent ENV."),
    ),
    also=("--config", "--dry-run"),
)


def load_iterate(args: Sequence[str]) -> IterateConfig:
    """Read the command-line words after ``iterate``, and the file that ``--config`` names.

    Raises:
        ConfigError: If a word is unknown, or a phase is told what the rounds decide.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    path, rest = take_config_flag(list(args))
    phases, rest = _split(rest)
    tables: dict[str, Any] = {} if path is None else read_file(path)
    if unknown := tables.keys() - set(PHASES):
        raise ConfigError(f"{path}: {sorted(unknown)[0]}", "", "is no phase", f"Write tables [{'], ['.join(PHASES)}].")
    return _checked(load(ITERATE, rest).iterate, {phase: (*_words(tables.get(phase, {})), *phases[phase]) for phase in PHASES})


def given_iterate(method: str, agent: str, given: Mapping[str, Any]) -> IterateConfig:
    """Return the settings of a call from Python; ``sample``, ``train`` and ``eval`` are dictionaries of settings of the phases.

    Raises:
        ConfigError: If a name is unknown, or a phase is told what the rounds decide.
    """
    own = {name: value for name, value in given.items() if name not in PHASES}
    options = load_given(ITERATE, {"method": method, "agent": agent, **own}).iterate
    return _checked(options, {phase: _words(given.get(phase, {})) for phase in PHASES})


def _checked(own: IterateOptions, phases: Mapping[str, tuple[str, ...]]) -> IterateConfig:
    for phase, words in phases.items():
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name[2:].replace("-", "_") in OWNED[phase]:
                remedy = f"Leave it out{'; --model and --seed are those of all rounds' if name in ('--model', '--seed') else ''}."
                raise ConfigError(f"--{phase}.{name[2:]}", word, "is decided by the rounds", remedy)
    if not own.agent and not any("--prompts" in word for word in phases["sample"]):
        raise ConfigError("--agent", "", "no environment is named", "Write agentrl iterate dpo envs/arithmetic.py.")
    if own.resume and own.run_dir is None:
        raise ConfigError("--resume", True, "needs to know which run", "Give --run-dir, the same each time.")
    return IterateConfig(iterate=own, phases=phases)


def _split(words: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The words of each phase, without its name, and the others; the values of a flag follow it."""
    phases: dict[str, list[str]] = {phase: [] for phase in PHASES}
    rest: list[str] = []
    target = rest
    for word in words:
        phase, dot, name = word.removeprefix("--").partition(".")
        if word.startswith("--"):
            of_phase = bool(dot) and phase in PHASES
            target = phases[phase] if of_phase else rest
            word = f"--{name}" if of_phase else word
        target.append(word)
    return {phase: tuple(own) for phase, own in phases.items()}, rest


def _words(table: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as words of a command line."""
    words: list[str] = []
    for name, value in table.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else "--no-" + flag(name)[2:])
        else:
            words += [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
    return tuple(words)
