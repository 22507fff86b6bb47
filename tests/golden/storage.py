"""File of the recordings: one line per case, with what differs from the case before it of the same command; compressed."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "data" / "golden.jsonl.xz"
"""The recordings of the code before its settings were resolved at one place."""

Fields = Mapping[str, Any]
"""What a case received: leaves by their paths."""


def write(path: Path, recordings: Iterable[tuple[str, str, Fields]]) -> None:
    """Write recordings, each with the name of its case and its command; equal recordings make equal bytes."""
    like: dict[str, Fields] = {}
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for name, command, fields in recordings:
            known = like.get(command, {})
            line = {
                "case": name,
                "command": command,
                "set": {path: value for path, value in fields.items() if path not in known or repr(known[path]) != repr(value)},
                "unset": [path for path in known if path not in fields],
            }
            file.write(json.dumps(line, sort_keys=True) + "\n")
            like[command] = fields


def read(path: Path = GOLDEN) -> Iterator[tuple[str, Fields]]:
    """Yield the recordings of a file with the names of their cases."""
    like: dict[str, Fields] = {}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            gone = set(row["unset"])
            fields = {path: value for path, value in like.get(row["command"], {}).items() if path not in gone} | row["set"]
            like[row["command"]] = fields
            yield row["case"], fields
