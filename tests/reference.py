"""Writes the generated pages of the documentation: settings from the schema, environments from envs/, metrics from their list.

python -m tests.reference [--check]
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.algo.plan import KINDS, AlgorithmKind
from agentrl.config.help import default_text, values
from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, bare, sections_of, settings_of
from agentrl.config.tune import TuneConfig
from agentrl.core.settings import flag
from tests import generated_pages, migration_tables
from tests.unit.rollout.families import table

INTRO = """\
# Configuration

<!-- Written by `make docs` from the fields of the settings; do not edit. -->

Every setting of `agentrl train`, by section. Settings come from the defaults, then from the file that `--config FILE` names, then
from flags. The file is TOML, YAML or JSON; its keys are the flags without dashes in front and with `_` for `-`, in sections or
without:

```toml
agent = "envs/calculator.py"
async = true

[learner]
learning_rate = 5e-4
```

`--dry-run` looks at the environment, the data and the model, prints the plan of the run and stops. The run writes the
same plan into its `config.json`. Under `sources` it says where each setting comes from that has not its plain default:
`flag`, `python` or `file`, or what decided it: `model`, `optimizer`, `machine`, `run` (the one that goes on) or
`settings` (others). What the machine decided is decided again on `--resume`, where a run may have it otherwise.
An unknown or
contradictory setting ends the command with exit code 2
before anything is started. Flags of OpenRLHF and TRL are taken for what they are here, which a line on standard error
says; one that is nothing here is refused with the reason. `agentrl translate` turns whole commands of these, of verl,
prime-rl and SkyRL into commands of agentrl: [coming from OpenRLHF](migrating.md), [TRL](from_trl.md),
[verl](from_verl.md), [prime-rl](from_prime_rl.md), [SkyRL](from_skyrl.md).

In [Python](python_api.md) the settings have the same names without dashes: `max_staleness=1`, and `async_=True` for `--async`.
"""


OPTIONS = """\
## Options of algorithms

An advantage estimator, a policy loss and an off-policy correction have options of their own, which are flags of a run
that chooses them. An algorithm in [a file of yours](algorithms.md#your-own-estimator-loss-correction-filter) declares
its options in the same way. `agentrl train --policy-loss sapo --help loss` lists those of one algorithm.
"""

HIDDEN = {flag("n_samples_per_prompt"), flag("temperature")}
"""Aliases that are settings of their own in training."""

TUNE_INTRO = """\
# Settings of supervised and preference training

<!-- Written by `make docs` from agentrl/config/tune.py; do not edit. -->

Every setting of the commands in [supervised and preference training](../tune.md): sections that all of them share, and then those of each
command. Settings come from the defaults, then from the file that `--config FILE` names, then from flags, as for
[`agentrl train`](../configuration.md).
"""


def render_tune() -> str:
    """The page of the commands in `agentrl.tune` as Markdown."""
    shared = settings_of(TuneConfig)
    pages = [TUNE_INTRO, *(_section(name, TuneConfig, "") for name in sections_of(TuneConfig) if name != "method")]
    for command, method in METHODS.items():
        pages.append(f"## agentrl {command}\n\n{_markdown(inspect.getdoc(method.config) or '')}\n")
        for name in ("data", "method"):
            own = [item for item in settings_of(method.config).values() if item.section == name and item.name not in shared]
            pages += [_table(own, command)] if own else []
    return "\n".join(pages)


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRO, *(_section(name, TrainConfig, "train") for name in sections_of(TrainConfig)), OPTIONS, *map(_options, KINDS)])


def _options(part: AlgorithmKind) -> str:
    """The options of the built-in algorithms of one kind; a table names the algorithms of each, and its defaults."""
    rows: dict[str, tuple[Setting, dict[str, str]]] = {}
    for name in part.built_in:
        for item in settings_of(TrainConfig.schema({part.setting: name})).values():
            if item.section == part.section:
                rows.setdefault(item.name, (item, {}))[1][name] = default_text(item.default)
    lines = [f"### Options of `{part.kind.flag}`", "", "| flag | values | default | of | meaning |", "|---|---|---|---|---|"]
    for item, defaults in rows.values():
        others = item.aliases("train")
        meaning = _markdown(item.doc) + (f" Also: {', '.join(f'`{alias}`' for alias in others)}." if others else "")
        values_of = sorted(set(defaults.values()), key=list(defaults.values()).index)
        default = (
            values_of[0]
            if len(values_of) == 1
            else "; ".join(f"{value} ({', '.join(name for name in defaults if defaults[name] == value)})" for value in values_of)
        )
        whose = "all" if len(defaults) == len(part.built_in) else ", ".join(f"`{name}`" for name in defaults)
        cells = (_flag_cell(flag(item.name), item.hint), values(item.hint), default, whose, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _section(name: str, settings: type[Any], command: str) -> str:
    rows = [item for item in settings_of(settings).values() if item.section == name]
    return f"## {name}\n\n{_markdown(inspect.getdoc(sections_of(settings)[name]) or '')}\n\n{_table(rows, command)}"


def _table(rows: Iterable[Setting], command: str) -> str:
    return "\n".join(
        ["| flag | values | default | on `--resume` | meaning |", "|---|---|---|---|---|", *(_row(item, command) for item in rows), ""]
    )


def _row(item: Setting, command: str) -> str:
    name, others = flag(item.name), [alias for alias in item.aliases(command) if alias not in HIDDEN]
    meaning = _markdown(item.doc) + (f" Also: {', '.join(f'`{alias}`' for alias in others)}." if others else "")
    resumed = "may differ" if item.may_change else "stays"
    cells = (_flag_cell(name, item.hint), values(item.hint), default_text(item.default), resumed, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag_cell(name: str, hint: Any) -> str:
    if bare(hint) is bool:
        return f"`{name}`, `--no-{name[2:]}`"
    return f"`{name}`"


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _chat_templates() -> str:
    """The page on chat templates, whose end is the table of families."""
    written, marker, _ = Path("docs/chat_templates.md").read_text(encoding="utf-8").partition("do not edit below. -->\n")
    return f"{written}{marker}\n{table()}"


PAGES = {
    "configuration.md": render,
    "tune/settings.md": render_tune,
    "gallery.md": generated_pages.gallery,
    "metrics.md": generated_pages.metrics,
    "suites.md": generated_pages.suites,
    "chat_templates.md": _chat_templates,
    **{f"{name}.md": partial(migration_tables.page, name) for name in migration_tables.PAGES},
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
