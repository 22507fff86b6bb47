"""Tables of the pages for users of other systems, from the tables that the commands read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.translate import System, systems

PAGES = {"migrating": "openrlhf", "from_trl": "trl", "from_verl": "verl", "from_prime_rl": "prime_rl", "from_skyrl": "skyrl"}
"""Page -> its system."""
BEGIN, END = "<!-- Written by `make docs` from agentrl/config/other_systems/{}.toml. -->", "<!-- Written by hand again. -->"
COUNTED: Mapping[str, tuple[str, str]] = {
    "prompts": ("`--groups-per-step`", "`--batch-size`"),
    "samples": ("`--n-samples-per-prompt`", "none"),
    "update_answers": ("`--mini-batches`: the answers of a step over those of an update", "`--batch-size`"),
    "update_prompts": ("`--mini-batches`: the prompts of a step over those of an update", "none"),
    "answers": (
        "`--groups-per-step`, with the ranks and the passes, over the answers to a prompt",
        "`--batch-size`, with the ranks and the passes",
    ),
    "passes": ("as the row above; `--micro-batch-tokens` bounds memory", "as the row above"),
    "per_generation": ("`--groups-per-step` and `--mini-batches`", "none"),
    "generation_answers": ("`--groups-per-step` times `--n-samples-per-prompt`", "none"),
    "updates": ("`--num-steps`, which counts steps of `--mini-batches` updates", "`--num-steps`"),
    "rows": ("`--num-steps`: rows, or this bound on them, times passes over `--groups-per-step`", "refused if the data have more rows"),
    "epochs": ("`--num-steps`, where the number of rows is known; else data are repeated as needed", "`--num-epochs`"),
    "warmup_share": ("`--lr-warmup-steps`: the share of `--num-steps`", "`--lr-warmup-steps`, where the number of rows is known"),
    "ranks": ("`--num-learners`, their product", "`--num-ranks`, their product"),
    "engine_gpus": ("`--tensor-parallel-size`, and `--num-engines`: the ranks over it", "none"),
}
"""Quantity -> what it is in reinforcement learning, and in training on given rows."""


def page(name: str) -> str:
    """Return a page with its tables written anew between the markers."""
    written = Path(f"docs/{name}.md").read_text(encoding="utf-8")
    begin = BEGIN.format(PAGES[name])
    before, marker, rest = written.partition(begin)
    _, end, behind = rest.partition(END)
    if not (marker and end):
        raise ValueError(f"docs/{name}.md lacks a line {begin if not marker else END}")
    return f"{before}{begin}\n\n{tables(systems()[PAGES[name]])}\n{END}{behind}"


def tables(system: System) -> str:
    """Return the tables of a system: reinforcement learning, and what is otherwise in training on given rows."""
    head = f"| {system.name} | agentrl |\n|---|---|\n"
    parts = [head + "".join(_rows(system, system.words, 0))]
    if system.tune:
        parts += [f"Training on given rows, where it differs:\n\n{head}" + "".join(_rows(system, system.tune, 1))]
    if system.defaults:
        usual = "; ".join(
            f"`{command}`: {', '.join(f'`{_shown(system, word)}` {value}' for word, value in words.items())}"
            for command, words in system.defaults.items()
        )
        parts.append(f"Values that {system.name} has where nothing is written, and that `agentrl translate` writes: {usual}.\n")
    return "\n".join(parts)


def _rows(system: System, table: Mapping[str, Any], column: int) -> Iterator[str]:
    for name, words in system.quantities.items():
        if COUNTED[name][column] != "none":
            yield _row(" times ".join(_names(system, word) for word in words), COUNTED[name][column])
    for word, meaning in sorted(table.items(), key=lambda row: row[0].lstrip("-*")):
        yield _row(_names(system, word), _meaning(system, meaning))


def _row(theirs: str, ours: str) -> str:
    return f"| {theirs} | {ours} |\n"


def _shown(system: System, word: str) -> str:
    return "--" + word[2:].replace("-", "_") if system.flags else word


def _names(system: System, word: str) -> str:
    """A word with its newer names."""
    # The optimizer of the critic in OpenRLHF 0.11 had no flags before.
    before = () if word == "--critic-adam" else (word,)
    renamed = [new for new, old in system.renamed.items() if old == word]
    return ", ".join(f"`{_shown(system, name)}`" for name in (*before, *renamed))


def _meaning(system: System, meaning: Any) -> str:
    if isinstance(meaning, Mapping):
        of = meaning.get("of", "")
        said = f"with `{_shown(system, of)}` " if of else ""
        parts = [(key, _meaning(system, part)) for key, part in meaning.items() if key != "of"]
        shown = {"*": "otherwise", "": "unset"}
        return "; ".join(
            f"{said if key not in shown or (of and not key) else ''}{shown.get(key, f'`{key}`')}: {text}" for key, text in parts
        )
    kind, _, why = meaning.partition(" ")
    if kind in ("always", "none"):
        text = re.sub(r"(?<!`)(--[a-z][a-z0-9-]*[a-z0-9])", r"`\1`", why) or "so"
        return f"always {text}" if kind == "always" else f"none: {text}" if not why.startswith("of ") else f"none {text}"
    flags = re.findall(r"--\S+(?: [^-{]\S*)*", re.sub(r" \{[^}]*\}", "", meaning))
    return " ".join(f"`{each}`" for each in flags)
