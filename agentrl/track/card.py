"""The model card of a run: ``model/README.md``, with the command, the result and how to load the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl.core.callbacks import Callback, RunBegin, RunEnd
from agentrl.core.files import write_text
from agentrl.track.recorders import launch

BUNDLED = "the tiny model that agentrl brings"


class ModelCard(Callback):
    """Writes the card beside the model at the end of a run that saved one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._config: Mapping[str, Mapping[str, Any]] = {}

    def on_run_begin(self, event: RunBegin) -> None:
        """Keep the settings."""
        self._config = event.config

    def on_run_end(self, event: RunEnd) -> None:
        """Write ``README.md``, if this run saved the model."""
        if event.status != "finished" or not self._directory.is_dir():
            return
        write_text(self._directory / "README.md", card(self._config, event.summary, launch()))


def card(config: Mapping[str, Mapping[str, Any]], summary: Mapping[str, Any], started: Mapping[str, Any]) -> str:
    """Return the card: front matter that model hubs read, then Markdown.

    Args:
        config: The settings by section, as in ``config.json``.
        summary: What ``summary.json`` holds.
        started: The launch, as in ``launches.jsonl``.
    """
    settings = {name: value for section in config.values() for name, value in section.items()}
    base, adapter = str(settings["model"]), bool(settings["lora_rank"])
    # Model hubs look this name up, and a directory of this machine is no name there.
    named = base.count("/") == 1 and not Path(base).exists() and not base.startswith((".", "/", "~"))
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": base} if named else {}
    front["tags"] = ["agentrl", "reinforcement-learning", *(["lora"] if adapter else [])]
    estimator = Path(str(settings["advantage_estimator"])).name
    rows = {
        "initial model": f"`{base}`" if base else BUNDLED,
        "environment": f"`{settings['agent']}`",
        "algorithm": f"`{estimator}`",
        "age of tokens": f"at most {int(age)} steps" if (age := (summary.get("staleness") or {}).get("max")) is not None else "",
        "steps": summary.get("steps"),
        "episodes": summary.get("episodes"),
        "mean reward, first and last steps": _pair(summary, "reward"),
        "mean score, first and last steps": _pair(summary, "score"),
        "agentrl": started.get("version"),
    }
    table = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
    what = "A LoRA adapter" if adapter else "A language model"
    return "\n".join(
        [
            "---",
            yaml.safe_dump(front, sort_keys=False).rstrip(),
            "---",
            "",
            f"# {Path(str(settings['run_dir'] or 'model')).name}",
            "",
            f"{what} trained by reinforcement learning with agentrl. The rewards are those of training; an evaluation is more.",
            "",
            *("| | |", "|---|---|", *table, ""),
            *("The run's command:", "", f"    {started['command']}", ""),
            *("Measure it, or train it further, with `--model` and the directory of this file.", ""),
        ]
    )


def _pair(summary: Mapping[str, Any], name: str) -> str:
    found = summary.get(name) or {}
    first, last = found.get("first"), found.get("last")
    return f"{first:.3g} to {last:.3g}" if first is not None and last is not None else ""
