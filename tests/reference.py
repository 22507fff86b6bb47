"""Writes the configuration reference from the schema.

python -m tests.reference [--check]
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import types
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from agentrl.config import schema
from agentrl.config.load import ALIASES, flag
from agentrl.config.schema import TrainConfig

DEFAULT_PATH = Path("docs/configuration.md")

INTRO = """\
# Configuration

<!-- Written by `make docs` from agentrl/config/schema.py; do not edit. -->

Every setting of `agentrl train`, by section. Settings come from the defaults, then from the file that `--config FILE` names, then
from flags. The file is TOML, YAML or JSON; its keys are the flags without dashes in front and with `_` for `-`, in sections or
without:

```toml
agent = "envs/calculator.py"
async = true

[learner]
learning_rate = 5e-4
```

`--dry-run` prints the resolved configuration and stops. An unknown or contradictory setting ends the command with exit code 2
before anything is started. Where OpenRLHF has a flag of the same meaning, its name is accepted too.
"""


def render() -> str:
    """The whole page as Markdown."""
    docs = field_docs(inspect.getsource(schema))
    pages = [INTRO]
    for section in dataclasses.fields(TrainConfig):
        kind = type(getattr(TrainConfig(), section.name))
        pages.append(_section(section.name, kind, docs[kind.__name__]))
    return "\n".join(pages)


def field_docs(source: str) -> dict[str, dict[str, str]]:
    """Class name -> field name -> the text under the field.

    Args:
        source: Python source of dataclasses whose fields are followed by docstrings.
    """
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = {}
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[node.name][name] = text
    return docs


def _section(name: str, kind: type[Any], docs: dict[str, str]) -> str:
    hints = get_type_hints(kind, include_extras=True)
    rows = [_row(item, hints[item.name], docs[item.name]) for item in dataclasses.fields(kind)]
    heading = f"## {name}\n\n{_markdown(inspect.getdoc(kind) or '')}\n"
    return "\n".join([heading, "| flag | values | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(item: dataclasses.Field[Any], hint: Any, doc: str) -> str:
    name = flag(item.name)
    aliases = [alias for alias, targets in ALIASES.items() if name in targets]
    meaning = _markdown(doc) + (f" OpenRLHF: {', '.join(f'`{alias}`' for alias in aliases)}." if aliases else "")
    cells = (_flag_cell(name, hint), values(hint), default_text(item.default), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag_cell(name: str, hint: Any) -> str:
    if _bare(hint) is bool:
        return f"`{name}`, `--no-{name[2:]}`"
    return f"`{name}`"


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def values(hint: Any) -> str:
    """What a field of type `hint` accepts, in words."""
    hint, limits = _unwrap(hint)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is tuple:
        return "texts" if args[-1] is Ellipsis else f"{len(args)} numbers"
    if origin in (Union, types.UnionType):
        return " or ".join(values(part) for part in args if part is not type(None))
    return (NAMES[hint] + _range(limits)).strip()


NAMES: dict[Any, str] = {bool: "on or off", int: "integer", float: "number", str: "text", Path: "path"}


def _unwrap(hint: Any) -> tuple[Any, list[Any]]:
    limits: list[Any] = []
    while get_origin(hint) is Annotated:
        limits += hint.__metadata__
        hint = hint.__origin__
    return hint, limits


def _bare(hint: Any) -> Any:
    return _unwrap(hint)[0]


def _range(limits: Iterable[Any]) -> str:
    words = []
    for limit in limits:
        if isinstance(limit, Ge):
            words.append(f"from {limit.ge}")
        elif isinstance(limit, Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, Le):
            words.append(f"to {limit.le}")
        elif isinstance(limit, Lt):
            words.append(f"below {limit.lt}")
    return " " + " ".join(words)


def default_text(value: object) -> str:
    """A default as it would be typed, or what stands for it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == "" or value == ():
        return "unset"
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: writes the page, or with ``--check`` only says whether it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description="Write the configuration reference.")
    parser.add_argument("--out", type=Path, default=DEFAULT_PATH, help="page to write (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    args = parser.parse_args(argv)
    page = render()
    if not args.check:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page, encoding="utf-8")
        return 0
    if args.out.exists() and args.out.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write(f"{args.out} is not what the schema says; run `make docs`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
