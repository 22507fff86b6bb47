"""Writes the generated pages of the documentation: settings from the schema, environments from envs/, metrics from their list.

python -m tests.reference [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from agentrl.config.help import bare, default_text, field_docs, setting_docs, values
from agentrl.config.load import aliases
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import flag
from agentrl.tune import settings as tune_settings
from agentrl.tune.load import ALIASES
from agentrl.tune.methods import METHODS
from agentrl.tune.settings import TuneConfig, TuneDataConfig, TuneLoraConfig, TuneTrackConfig
from tests import generated_pages

INTRO = """\
# Configuration

<!-- Written by `make docs` from agentrl/config; do not edit. -->

Every setting of `agentrl train`, by section. Settings come from the defaults, then from the file that `--config FILE` names, then
from flags. The file is TOML, YAML or JSON; its keys are the flags without dashes in front and with `_` for `-`, in sections or
without:

```toml
agent = "envs/calculator.py"
async = true

[learner]
learning_rate = 5e-4
```

`--dry-run` looks at the environment, the data and the model, prints the resolved configuration and stops. An unknown or
contradictory setting ends the command with exit code 2
before anything is started. OpenRLHF's and TRL's names for the same setting are
accepted too; their other flags, and verl's keys, are answered with one line each.

In [Python](python_api.md) the settings have the same names without dashes: `max_staleness=1`, and `async_=True` for `--async`.
"""


TUNE_INTRO = """\
# Settings of supervised and preference training

<!-- Written by `make docs` from agentrl/tune; do not edit. -->

Every setting of the commands in [supervised and preference training](../tune.md): sections that all of them share, and then those of each
command. Settings come from the defaults, then from the file that `--config FILE` names, then from flags, as for
[`agentrl train`](../configuration.md).
"""


def render_tune() -> str:
    """The page of the commands in `agentrl.tune` as Markdown."""
    docs = {**setting_docs(), **field_docs(inspect.getsource(tune_settings))}
    shared = [section.name for section in dataclasses.fields(TuneConfig) if section.name != "method"]
    pages = [TUNE_INTRO, *(_tune_section(name, name, TuneConfig(), docs) for name in shared)]
    for command, method in METHODS.items():
        pages += [f"## agentrl {command}\n\n{_markdown(inspect.getdoc(method.config) or '')}\n"]
        pages += [_tune_section("", name, method.config(), docs, own=name == "data") for name in ("data", "method")]
    return "\n".join(filter(None, pages))


def _tune_section(title: str, name: str, config: TuneConfig, docs: dict[str, dict[str, str]], *, own: bool = False) -> str:
    """A section as a table; with `own` the settings that it has beyond the shared ones."""
    kind = type(getattr(config, name))
    hints = get_type_hints(kind, include_extras=True)
    hidden = set(kind.__annotations__) if kind in (TuneLoraConfig, TuneTrackConfig) else set()
    hidden |= {item.name for item in dataclasses.fields(TuneDataConfig)} if own else set()
    described = {item: text for base in reversed(kind.__mro__) for item, text in docs.get(base.__name__, {}).items()}
    names = {alias: [target] for alias, target in ALIASES.items()}
    rows = [_row(item, hints[item.name], described[item.name], names) for item in dataclasses.fields(kind) if item.name not in hidden]
    if not rows:
        return ""
    heading = f"## {title}\n\n{_markdown(inspect.getdoc(kind) or '')}\n\n" if title else ""
    return "\n".join([f"{heading}| flag | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def render() -> str:
    """The whole page as Markdown."""
    docs = setting_docs()
    pages = [INTRO]
    for section in dataclasses.fields(TrainConfig):
        kind = type(getattr(TrainConfig(), section.name))
        pages.append(_section(section.name, kind, docs[kind.__name__]))
    return "\n".join(pages)


def _section(name: str, kind: type[Any], docs: dict[str, str]) -> str:
    hints = get_type_hints(kind, include_extras=True)
    rows = [_row(item, hints[item.name], docs[item.name], aliases()) for item in dataclasses.fields(kind)]
    heading = f"## {name}\n\n{_markdown(inspect.getdoc(kind) or '')}\n"
    return "\n".join([heading, "| flag | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(item: dataclasses.Field[Any], hint: Any, doc: str, other_names: Mapping[str, Sequence[str]]) -> str:
    name = flag(item.name)
    others = [alias for alias, targets in other_names.items() if name in targets]
    meaning = _markdown(doc) + (f" Also: {', '.join(f'`{alias}`' for alias in others)}." if others else "")
    cells = (_flag_cell(name, hint), values(hint), default_text(item.default), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag_cell(name: str, hint: Any) -> str:
    if bare(hint) is bool:
        return f"`{name}`, `--no-{name[2:]}`"
    return f"`{name}`"


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


PAGES = {
    "configuration.md": render,
    "tune/settings.md": render_tune,
    "gallery.md": generated_pages.gallery,
    "metrics.md": generated_pages.metrics,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: writes the pages, or with ``--check`` only says whether they are up to date; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description="Write the generated pages.")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder to write into (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    args = parser.parse_args(argv)
    outdated = 0
    for name, make in PAGES.items():
        path, page = args.docs / name, make()
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != page:
            sys.stderr.write(f"{path} is not up to date; run `make docs`\n")
            outdated = 1
    return outdated


if __name__ == "__main__":
    sys.exit(main())
