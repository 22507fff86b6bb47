"""Command lines of the documentation as cases: ``python -m tests.golden.documented`` writes ``data/documented.jsonl`` anew.

Each command of a page is a case, and each recipe, on a machine that has what it asks for. What needs a network or a file of the reader
has a stand-in in the folder of the recordings, or is recorded as refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.doc_commands import PAGES, ROOT, Shown, shown_commands
from tests.golden.cases import DOCUMENTED
from tests.golden.edges import METHODS

RECORDED = {"train", "eval", "sample", "play", "serve", "serve-reward-model", "plan", "check", "replay", "export", "iterate", *METHODS}
"""Commands that are recorded; the others read runs, examine machines or copy files."""
MACHINES: tuple[tuple[str, str], ...] = (
    (r"--ray-address|qwen2\.5-72b-4x8|30b-a3b-2x8", "cluster-4x8"),
    (r"--tensor-parallel-size [48]", "gpu16"),
    (r"1x8\.toml", "gpu8"),
    (r"1x4\.toml", "gpu4"),
    (r"--sandbox container|harbor:", "podman"),
)
"""Expressions found in a command, and the machine that it is for; the first counts."""
ARITHMETIC = "train --agent envs/arithmetic.py --run-dir runs/sums --save-every 10"
BEFORE: tuple[tuple[str, str], ...] = (
    (r"--resume runs/sums", ARITHMETIC),
    (
        r"--run runs/calculator|(?:replay|export) runs/calculator",
        "train --agent envs/calculator.py --run-dir runs/calculator --save-every 10",
    ),
    (r"(?:replay|export) runs/sums", ARITHMETIC),
    (r"--run runs/second", "train --agent second_try.py --run-dir runs/second"),
)
"""Expressions found in a command, and the command whose run it reads."""
ALSO = "gpu1"
"""Machine on which trainings of the documentation are recorded as well."""
SECONDS = re.compile(r"^(train|eval) ")


def rows() -> Iterator[dict[str, Any]]:
    """Yield the cases."""
    shown = {shown.words: shown for page in PAGES for shown in shown_commands(page) if shown.program == "agentrl"}
    for number, command in enumerate(shown.values(), 1):
        if command.words[1] in RECORDED:
            yield from _rows(command, number)
    for path in sorted([ROOT / "examples" / "train.toml", *(ROOT / "examples" / "recipes").rglob("*.toml")]):
        name = path.relative_to(ROOT).as_posix()
        words = ["train", "--config", name]
        if not re.search(r"^agent\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            words += ["--agent", "my_env.py"]
        for machine in dict.fromkeys(("cpu", ALSO, _machine(" ".join(words)))):
            joins = ("--ray-address", "HEAD:6379", "--run-dir", "runs/shared") if machine.startswith("cluster") else ()
            yield {"name": f"recipe-file {name} {machine}", "machine": machine, "words": [*words, *joins]}


def _rows(command: Shown, number: int) -> Iterator[dict[str, Any]]:
    words = [word.removeprefix("/") if word.startswith("/shared/") else word for word in command.words[1:]]  # nothing is written there
    text = " ".join(words)
    before = [line.split() for pattern, line in BEFORE if re.search(pattern, text)]
    row = {"machine": _machine(text), "words": words} | ({"before": before} if before else {})
    yield {"name": f"documented {number:03} {command.page}", **row}
    if SECONDS.match(text) and row["machine"] == "cpu" and "--help" not in words:
        yield {"name": f"documented-{ALSO} {number:03} {command.page}", **row, "machine": ALSO}


def _machine(text: str) -> str:
    return next((machine for pattern, machine in MACHINES if re.search(pattern, text)), "cpu")


def main(words: Sequence[str] = ()) -> None:
    """Write the file."""
    lines = [json.dumps(row) for row in rows()]
    DOCUMENTED.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sys.stdout.write(f"{len(lines)} command lines\n")


if __name__ == "__main__":
    main()
