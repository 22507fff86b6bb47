"""The settings of ``agentrl iterate``: how many rounds, and what each phase of a round is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from agentrl.config.load import read_file, take_config_flag, with_agent_flag
from agentrl.config.sections import Count, CountOrZero, flag
from agentrl.core.errors import ConfigError

PHASES = ("sample", "train", "eval")
OWNED: Mapping[str, tuple[str, ...]] = {
    "sample": ("model", "agent", "output", "resume", "select", "seed"),
    "train": ("model", "data", "run_dir", "resume", "seed"),
    "eval": ("model", "agent", "output", "run", "baseline"),
}
"""Settings of each phase that the rounds decide."""


@dataclass(frozen=True, kw_only=True)
class IterateConfig:
    """Sample, score, train, evaluate, and again: iterative DPO (``dpo``) or rejection sampling with fine-tuning (``sft``, RAFT).

    Prefix a flag with the name of its phase: ``--sample.n-samples-per-prompt 8 --train.num-steps 30 --eval.eval-size 64``. Or write it in
    the tables ``[sample]``, ``[train]`` and ``[eval]`` of ``--config FILE``.
    """

    method: Annotated[tyro.conf.Positional[Literal["dpo", "sft"]], tyro.conf.arg(metavar="{dpo,sft}")] = "dpo"
    """``dpo`` trains on pairs of the best and the worst answers, ``sft`` on the best."""
    agent: str = ""
    """Environment or reward, as for ``agentrl train``; it may stand behind the method."""
    model: str = ""
    """Model to begin with: a directory or hub name. Empty: the tiny chat model that ships with agentrl."""
    rounds: Count = 3
    """Rounds."""
    seed: CountOrZero = 0
    """Seed; each round samples and trains with one of its own."""
    run_dir: Path | None = None
    """Directory of all rounds. Default: ``runs/iterate-<environment>-<date>-<time>``."""
    resume: bool = False
    """Go on in ``--run-dir`` where an earlier command was ended."""
    debug: bool = False
    """Show tracebacks."""
    sample: tyro.conf.Suppress[tuple[str, ...]] = field(default=())
    train: tyro.conf.Suppress[tuple[str, ...]] = field(default=())
    eval: tyro.conf.Suppress[tuple[str, ...]] = field(default=())

    def words(self, phase: str) -> tuple[str, ...]:
        """Return the words that the user has for a phase."""
        found: tuple[str, ...] = getattr(self, phase)
        return found


DESCRIPTION = (
    "Sample, score, train, evaluate, and again, as one run that can be resumed. Settings of a phase stand behind its name: "
    "--sample.n-samples-per-prompt 8 --train.num-steps 30 --eval.eval-size 64; see agentrl sample, dpo, sft and eval --help. "
    "--dry-run checks all of them and stops."
)


def load_iterate(args: Sequence[str]) -> IterateConfig:
    """Read the command-line words after ``iterate``, and the file that ``--config`` names.

    Raises:
        ConfigError: If a word is unknown, or a phase is told what the rounds decide.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    path, rest = take_config_flag(list(args))
    phases, rest = _split(rest)
    method, others = rest[:1], rest[1:]
    if method and not method[0].startswith("-"):
        others = with_agent_flag(others)
    words = [*method, *others]
    own = tyro.cli(IterateConfig, prog="agentrl iterate", args=words, config=(tyro.conf.OmitArgPrefixes,), description=DESCRIPTION)
    given = _from_file(path)
    return _checked(own, {phase: (*given[phase], *phases[phase]) for phase in PHASES})


def given_iterate(method: str, agent: str, given: Mapping[str, Any]) -> IterateConfig:
    """Return the settings of a call from Python; ``sample``, ``train`` and ``eval`` are dictionaries of what the phases are told.

    Raises:
        ConfigError: If a name is unknown, or a phase is told what the rounds decide.
    """
    known = {item.name for item in fields(IterateConfig)} - {"method", "agent"}
    if unknown := given.keys() - known:
        raise ConfigError(sorted(unknown)[0], "", "is not a setting of iterate", f"Settings: {', '.join(sorted(known))}.")
    if method not in ("dpo", "sft"):
        raise ConfigError("method", method, "is not a method", "Use dpo or sft.")
    own = {name: value for name, value in given.items() if name not in PHASES}
    if own.get("run_dir") is not None:
        own["run_dir"] = Path(own["run_dir"])
    config = IterateConfig(method=method, agent=agent, **own)  # type: ignore[arg-type]
    tables = {phase: given.get(phase, {}) for phase in PHASES}
    return _checked(config, {phase: _table_words(table) for phase, table in tables.items()})


def _checked(own: IterateConfig, phases: Mapping[str, tuple[str, ...]]) -> IterateConfig:
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
    return replace(own, sample=phases["sample"], train=phases["train"], eval=phases["eval"])


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
    return {phase: tuple(found) for phase, found in phases.items()}, rest


def _from_file(path: Path | None) -> dict[str, tuple[str, ...]]:
    """The tables of a file as words."""
    tables: dict[str, Any] = {} if path is None else read_file(path)
    if unknown := tables.keys() - set(PHASES):
        raise ConfigError(f"{path}: {sorted(unknown)[0]}", "", "is no phase", f"Write tables [{'], ['.join(PHASES)}].")
    return {phase: _table_words(tables.get(phase, {})) for phase in PHASES}


def _table_words(table: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(word for name, value in table.items() for word in _words(name, value))


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else "--no-" + flag(name)[2:]]
    return [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
