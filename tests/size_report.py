"""Prints the sizes of files and functions; fails when one is far beyond what a reader can hold.

python -m tests.size_report
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("agentrl", "envs", "examples", "tests")
FILE_AIM, FILE_LIMIT = 400, 420
FUNCTION_AIM, FUNCTION_LIMIT = 50, 60


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length in lines of every function in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def measure(root: Path) -> tuple[dict[str, tuple[int, int]], list[tuple[int, str]], list[tuple[int, str]]]:
    """Sizes of the Python files below `root`.

    Returns:
        Files and lines per package, files above the aim, functions above the aim (both as length and place).
    """
    packages: dict[str, list[int]] = defaultdict(list)
    long_files, long_functions = [], []
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        name, source = path.relative_to(root), path.read_text(encoding="utf-8")
        lines = source.count("\n")
        packages["/".join(name.parts[:2]) if len(name.parts) > 2 else name.parts[0]].append(lines)
        if lines > FILE_AIM:
            long_files.append((lines, str(name)))
        long_functions += [(size, f"{name}:{line} {label}") for label, line, size in functions(source) if size > FUNCTION_AIM]
    totals = {package: (len(sizes), sum(sizes)) for package, sizes in packages.items()}
    return totals, sorted(long_files, reverse=True), sorted(long_functions, reverse=True)


def main(root: Path = ROOT) -> int:
    """Print the report; returns 1 if a limit is passed."""
    packages, files, longest = measure(root)
    for package, (count, lines) in sorted(packages.items()):
        print(f"{lines:7d} lines in {count:3d} files  {package}")
    print(f"{sum(lines for _, lines in packages.values()):7d} lines in all")
    for title, rows, limit in (("files", files, FILE_LIMIT), ("functions", longest, FUNCTION_LIMIT)):
        for size, place in rows:
            print(f"{'TOO LONG' if size > limit else 'long':>8} {size} lines ({title} end at {limit}): {place}")
    return int(any(size > FILE_LIMIT for size, _ in files) or any(size > FUNCTION_LIMIT for size, _ in longest))


if __name__ == "__main__":
    sys.exit(main())
