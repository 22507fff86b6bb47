"""Renders docs/gallery.md from the docstrings of envs/, docs/metrics.md from the list of metrics, and the table of docs/suites.md."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from agentrl.suites.registry import BUILT_IN, scheme_of
from agentrl.track.glossary import glossary

ROOT = Path(__file__).parents[1]

GALLERY = """\
# Gallery of environments

<!-- Written by `make docs` from envs/; do not edit. -->

Each of these environments is one file, plain Python on the public interface, to read, to run and to copy. Copy the file, change it, and
name your copy with `--agent`. [Writing an environment](environments.md) explains the form from ten lines up.

| environment | description |
|---|---|
"""

METRICS = """\
# Metrics

<!-- Written by `make docs` from agentrl/track/metrics.toml; do not edit. -->

Every step of a run is one line of `metrics.jsonl`, and the same figures go to TensorBoard and W&B. In a name, `<...>` stands for a word of
the run's own, such as an agent's name. A figure that a step has nothing to measure for is `null` or left out.

## Watch these six

| metric | meaning |
|---|---|
"""


def gallery() -> str:
    """The page about the ready-made environments."""
    texts = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in sorted((ROOT / "envs").glob("*.py"))}
    rows = [f"| [{path.stem}](#{path.stem}) | {_cell(text.partition(chr(10) * 2)[0])} |" for path, text in texts.items()]
    sections = [
        f"## {path.stem}\n\n[`envs/{path.name}`](../envs/{path.name})\n\n{_shown(path)}{markdown(text)}\n" for path, text in texts.items()
    ]
    return GALLERY + "\n".join([*rows, "", *sections])


def _shown(path: Path) -> str:
    """The picture of an environment that shows pictures, made by `tests.env_pictures`."""
    picture = f"gallery/{path.stem}.png"
    return f"![Pictures of {path.stem}]({picture})\n\n" if (ROOT / "docs" / picture).is_file() else ""


def metrics() -> str:
    """The page about every metric, the six to watch first."""
    known = glossary()
    first = [metric for name in known.watch for metric in known.metrics if metric.name == name]
    page = METRICS + "\n".join(f"| `{metric.name}` | {_cell(metric.text)} |" for metric in first)
    for section, title in known.titles.items():
        rows = [f"| `{metric.name}` | {_cell(metric.text)} |" for metric in known.metrics if metric.section == section]
        page += f"\n\n## {title}\n\n| metric | meaning |\n|---|---|\n" + "\n".join(rows)
    return page + "\n"


SCHEMES_BEGIN, SCHEMES_END = "<!-- schemes: begin -->\n", "<!-- schemes: end -->\n"


def suites() -> str:
    """The page about suites, which has a table of the schemes that people write."""
    before, begin, rest = (ROOT / "docs" / "suites.md").read_text(encoding="utf-8").partition(SCHEMES_BEGIN)
    _, end, after = rest.partition(SCHEMES_END)
    schemes = [scheme for name in BUILT_IN if (scheme := scheme_of(f"{name}:")).form]
    rows = [f"| `{scheme.form}` | {_cell(scheme.about)} | {_cell(scheme.needs)} |\n" for scheme in schemes]
    return "".join((before, begin, "| `--agent` | environments | needs |\n|---|---|---|\n", *rows, end, after))


def markdown(docstring: str) -> str:
    """A docstring as Markdown: what is indented after a paragraph that ends with ``::`` is a command, the rest of it an episode."""
    parts = []
    for block in re.split(r"\n\n(?! )|\n\n(?=    )", docstring):
        if block.startswith("    "):
            parts.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(block.replace("``", "`").removesuffix("::") + (":" if block.endswith("::") else ""))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")
