"""Writes the data of docs/pipeline.md: questions to train on, others to compare models on, and demonstrations of which half are mistaken.

    python examples/pipeline/make_data.py [FOLDER]

The same seed gives the same files.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

SEED = 7
NAMES = {"+": "add", "-": "sub", "*": "mul"}
MISTAKEN = 0.5
"""Share of the demonstrations with a mistake: a model that imitates them is right only some of the time, and can be made better."""


def questions() -> list[dict[str, str]]:
    """Return all questions about two digits, with the call that answers each."""
    return [
        {"prompt": f"{a}{sign}{b}=?", "label": f"{name}({a},{b})"} for a in range(10) for b in range(10) for sign, name in NAMES.items()
    ]


def demonstrations(asked: list[dict[str, str]], rng: random.Random) -> list[dict[str, str]]:
    """Return two answers to each question, in random order."""
    rows = [row for _ in range(2) for row in rng.sample(asked, len(asked))]
    return [
        {"prompt": row["prompt"], "completion": mistaken(row["label"], rng) if rng.random() < MISTAKEN else row["label"]} for row in rows
    ]


def mistaken(call: str, rng: random.Random) -> str:
    """Return the call with another digit, another name, or a form that is no call."""
    name, a, b = call[:3], call[4], call[6]
    kind = rng.choice(["digit", "digit", "name", "form", "form"])
    if kind == "name":
        return f"{rng.choice([other for other in NAMES.values() if other != name])}({a},{b})"
    if kind == "form":
        return rng.choice([call[:-1], call.replace(",", ""), f"{a}{b}", f"{call})"])
    if rng.random() < 0.5:
        return f"{name}({other_digit(a, rng)},{b})"
    return f"{name}({a},{other_digit(b, rng)})"


def other_digit(digit: str, rng: random.Random) -> str:
    """Return a digit that is not the given one."""
    return rng.choice([other for other in "0123456789" if other != digit])


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """Write all files."""
    trained = [row for index, row in enumerate(questions()) if index % 5]
    write(folder / "questions.jsonl", trained)
    write(folder / "held_out.jsonl", [row for index, row in enumerate(questions()) if not index % 5])
    write(folder / "demonstrations.jsonl", demonstrations(trained, random.Random(SEED)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
