"""From words, a file or Python arguments to the checked settings of a method; nothing heavy is imported."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tyro
from pydantic import TypeAdapter, ValidationError

from agentrl.config.load import TYRO, field_error, flag_value, read_file, take_config_flag
from agentrl.config.sections import flag
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.tune.methods import METHODS, Method
from agentrl.tune.rules import check, with_learning_rate
from agentrl.tune.settings import TuneConfig

AUTO = "auto"

ALIASES = {
    "--pretrain": "--model",
    "--model-name-or-path": "--model",
    "--dataset": "--data",
    "--dataset-name": "--data",
    "--dataset-probs": "--data-probs",
    "--dataset-split": "--data-split",
    "--eval-dataset": "--eval-data",
    "--max-len": "--max-length",
    "--input-key": "--prompt-key",
    "--output-key": "--completion-key",
    "--train-batch-size": "--batch-size",
    "--micro-train-batch-size": "--micro-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--max-epochs": "--num-epochs",
    "--num-train-epochs": "--num-epochs",
    "--max-steps": "--num-steps",
    "--save-path": "--run-dir",
    "--output-dir": "--run-dir",
    "--eval-steps": "--eval-every",
    "--save-steps": "--save-every",
    "--loss-type": "--loss",
    "--ref-pretrain": "--reference",
    "--teacher-model": "--teacher",
    "--packing-samples": "--packing",
}
"""Names that OpenRLHF and TRL have for the same settings -> ours."""

MAY_CHANGE = frozenset(
    {
        *("num_steps", "num_epochs", "run_dir", "save_every", "keep_checkpoints", "resume", "debug"),
        *("eval_every", "keep_best", "tensorboard", "wandb_project", "trackio_project", "gradient_checkpointing"),
    }
)
"""Settings that a resumed run may have otherwise; they decide where and how fast it goes, not what is learnt."""


def load(method: Method, words: Sequence[str]) -> TuneConfig:
    """Read the words after a command, and the file that ``--config`` or the run that ``--resume`` names.

    Raises:
        ConfigError: If a setting is unknown, out of range or contradicts another.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    prog = f"agentrl {method.command}"
    words = [_known_as(word, method) for word in words]
    if not any(word in ("-h", "--help") for word in words):
        _refuse_unknown(words, method, prog)
    path, rest = take_config_flag(words)
    path = path or saved_settings(flag_value(rest, "--resume") or "")
    default = from_mapping(method, read_file(path), source=str(path)) if path else method.config()
    description = f"{(method.config.__doc__ or '').strip()} Settings come from the defaults, then from --config FILE, then from flags."
    return finished(method, tyro.cli(method.config, prog=prog, args=rest, default=default, config=TYRO, description=description))


def load_given(method: Method, given: Mapping[str, Any]) -> TuneConfig:
    """Return the checked settings that Python code gives by name, over those of the file ``config`` or the run ``resume``.

    Raises:
        ConfigError: If one is unknown, out of range or contradicts another.
    """
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    config = settings.pop("config", None)
    path = Path(config) if config is not None else saved_settings(str(settings.get("resume", "")))
    saved = _flat(read_file(path), method) if path else {}
    return finished(method, from_mapping(method, {**saved, **settings}, source="settings"))


def finished(method: Method, config: TuneConfig) -> TuneConfig:
    """Return the settings with their ranges and the rules between them checked, and the learning rate filled in."""
    return check(method, with_learning_rate(method, _validated(method, dataclasses.asdict(config), "")))


def saved_settings(resume: str) -> Path | None:
    """Return the file with the settings of the run that ``--resume`` names; `None` if it names none.

    Raises:
        ConfigError: If the directory holds no run.
    """
    if resume in ("", AUTO):
        return None
    saved = Path(resume).expanduser() / "config.json"
    if not saved.is_file():
        raise ConfigError("--resume", resume, "holds no run", "Name a run's directory, as printed at its end.")
    return saved


def from_mapping(method: Method, data: Mapping[str, Any], *, source: str) -> TuneConfig:
    """Build settings from sections, flat keys or a mix.

    Raises:
        ConfigError: If a key is unknown (the nearest one is named), or a value has the wrong type.
    """
    homes = field_homes(method)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in _flat(data, method).items():
        if key not in homes:
            near = difflib.get_close_matches(key, list(homes), n=1, cutoff=0.5)
            remedy = f"Did you mean `{near[0]}`?" if near else f"`agentrl {method.command} --help` lists every setting."
            raise ConfigError(f"{source}: {key}", value, f"is not a setting of agentrl {method.command}", remedy)
        sections.setdefault(homes[key], {})[key] = value
    return _validated(method, sections, source)


def _flat(data: Mapping[str, Any], method: Method) -> dict[str, Any]:
    sections = {item.name for item in dataclasses.fields(method.config)}
    found: dict[str, Any] = {}
    for key, value in data.items():
        items = value.items() if key in sections and isinstance(value, Mapping) else ((key, value),)
        found |= {name.replace("-", "_"): item for name, item in items if name != "command"}
    return found


def _validated(method: Method, sections: Mapping[str, Any], source: str) -> TuneConfig:
    try:
        return _adapter(method.command).validate_python(sections)
    except ValidationError as error:
        raise field_error(error, method.command, source) from None


@cache
def _adapter(command: str) -> TypeAdapter[TuneConfig]:
    return TypeAdapter(METHODS[command].config)


def field_homes(method: Method) -> dict[str, str]:
    """Return the section of each setting of a method."""
    config = method.config()
    return {item.name: section.name for section in dataclasses.fields(config) for item in dataclasses.fields(getattr(config, section.name))}


def _known_as(word: str, method: Method) -> str:
    name, equals, value = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    own = {flag(known) for known in field_homes(method)}
    return (name if name in own else ALIASES.get(name, name)) + equals + value


def _refuse_unknown(words: Sequence[str], method: Method, prog: str) -> None:
    known = [flag(name) for name in field_homes(method)]
    known += [f"--no-{name[2:]}" for name in known]
    known += ["--config", "--tyro-print-completion", "--tyro-write-completion"]
    found = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            found.append((name, f"did you mean {near[0]}?" if near else f"unknown; `{prog} --help` lists every setting"))
    if found:
        raise UnknownFlagError(prog, tuple(found))


def to_json(method: Method, config: TuneConfig) -> str:
    """Return the resolved settings as indented JSON, by section, with the command that they belong to."""
    return json.dumps({"command": method.command, **dataclasses.asdict(config)}, indent=2, default=str)


def check_unchanged(method: Method, saved: Mapping[str, Any], config: TuneConfig) -> None:
    """Check that a run can go on with these settings.

    Raises:
        ConfigError: If a setting differs that decides what is learned.
    """
    before, now = _flat(saved, method), _flat(json.loads(to_json(method, config)), method)
    fixed = MAY_CHANGE if getattr(config.optim, "lr_schedule", "") == "constant" else MAY_CHANGE - {"num_steps", "num_epochs"}
    changed = [
        f"{flag(name)} (was {before[name]!r}, now {value!r})"
        for name, value in now.items()
        if name not in fixed and before.get(name, value) != value
    ]
    if changed:
        problem = "cannot go on, because it would be another run with " + ", ".join(changed)
        raise ConfigError("--resume", config.run.resume, problem, "Leave these as they were, or start a new run.")
