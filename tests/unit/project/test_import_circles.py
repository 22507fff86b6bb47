"""No module needs one that needs it, also not inside a function or for the type checker alone, where a circle hides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[3]


def modules() -> dict[str, Path]:
    """Dotted name -> file; a package has the name of its folder."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "agentrl").rglob("*.py")]
    return {".".join(path.parts[:-1] if path.stem == "__init__" else path.with_suffix("").parts): path for path in paths}


def imports(tree: ast.AST) -> Iterator[str]:
    """What code imports anywhere, also for the type checker only, as ``package.module`` and ``package.module.name``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node)


def needs(known: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each imports itself."""
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        words = imports(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        found[name] = {word if word in known else word.rpartition(".")[0] for word in words} & known.keys() - {name}
    return found


def test_imports_go_round_nowhere() -> None:
    graph = needs(modules())
    assert "agentrl.api.run" in graph["agentrl.api.commands"], "imports for the type checker are not seen"
    assert "agentrl.env.remote.http" in graph["agentrl.env.rewards.function"], "imports inside functions are not seen"
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle in its message
