"""Tokenised rows that are kept for other runs, under a hash of all that they follow from. One process of a machine makes them.

The others wait for it: the ranks of a run, or runs of the same data that begin together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agentrl.config.tune import MethodConfig, TuneDataConfig
from agentrl.core.errors import CheckpointError
from agentrl.core.files import check_directory, commit_directory, temporary_directory
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.template import ChatTemplate
from agentrl.tune.data import Examples
from agentrl.tune.forms import Answer, Chat, Example, Labelled, Pair, Steps, Text
from agentrl.tune.row_table import RowTable

MIN_EXAMPLES = 1000
"""Examples from which rows are kept: fewer are tokenised faster than they are looked up."""
KEPT = 16
"""Sets of rows that stay; the one that was not used for the longest time goes first."""
OFF = "none"
ELSEWHERE = frozenset({"data", "data_probs", "data_split", "eval_data", "eval_split", "eval_size", "bad_rows", "max_bad_rows", "shuffle"})
"""Settings of the data that do not change the tokens of an example."""
METHOD = ("train_on", "step_separator", "last_step_only")
"""Settings of methods that do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """Rows of a cache: those of each part, those that are held out, and what else was noted."""

    parts: tuple[Sequence[Any], ...]
    held_out: Sequence[Any]
    notes: dict[str, Any]


def folder_of(token_cache: str) -> Path | None:
    """Return the directory of the cache; `None` without one."""
    if token_cache == OFF:
        return None
    own = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(token_cache or f"{own}/agentrl/rows").expanduser()


def cached(
    examples: Examples, tokenizer: Any, data: TuneDataConfig, model: ModelConfig, method: MethodConfig, make: Callable[[], Kept]
) -> Kept:
    """Return the rows of the examples from the cache; else make them, and keep them there.

    Rows with images are not kept, since they follow from files beside the data, and few rows are not.
    """
    root = folder_of(data.token_cache)
    all_examples = [example for part in (*examples.parts, examples.held_out) for example in part]
    # The key needs the whole tokenizer as text, which only fast ones can give.
    if root is None or len(all_examples) < MIN_EXAMPLES or not getattr(tokenizer, "is_fast", False):
        return make()
    if any(getattr(example, "images", ()) for example in all_examples):
        return make()
    folder = root / key(examples, tokenizer, data, model, method)
    try:
        with _held(folder):
            if (found := _read(folder / "rows")) is not None:
                # The time of the folder says when its rows were last used.
                os.utime(folder)
                return found
            made = make()
            if all(isinstance(rows, RowTable) for rows in (*made.parts, made.held_out)):
                _write(folder / "rows", made)
                _make_room(root, folder)
            return made
    except OSError:  # a full or read-only disk stops no run
        return make()


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Within the block, no other process of this machine makes the rows of a folder; its end, whatever it is, lets go of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> Kept | None:
    try:
        check_directory(folder)
    except CheckpointError:
        return None
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    tables = [RowTable.read(folder / str(number)) for number in range(about["tables"])]
    return Kept(tuple(tables[:-1]), tables[-1], about["notes"])


def _write(folder: Path, made: Kept) -> None:
    temporary = temporary_directory(folder)
    tables = (*made.parts, made.held_out)
    for number, rows in enumerate(tables):
        assert isinstance(rows, RowTable)
        rows.write(temporary / str(number))
    about = {"tables": len(tables), "notes": made.notes}
    (temporary / "about.json").write_text(json.dumps(about), encoding="utf-8")
    # A process that was killed may have left an incomplete set there.
    shutil.rmtree(folder, ignore_errors=True)
    commit_directory(temporary, folder)


def _make_room(root: Path, own: Path) -> None:
    """Remove the sets of rows beyond `KEPT` that were not used for the longest time."""
    others = sorted((path for path in root.iterdir() if path.is_dir() and path != own), key=lambda path: path.stat().st_mtime)
    for path in others[: max(len(others) + 1 - KEPT, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def key(examples: Examples, tokenizer: Any, data: TuneDataConfig, model: ModelConfig, method: MethodConfig) -> str:
    """Return a hash of examples, tokenizer, chat template and settings: of all that rows follow from."""
    of_data = {name: value for name, value in dataclasses.asdict(data).items() if name not in ELSEWHERE and name != "token_cache"}
    of_method = {name: getattr(method, name, None) for name in METHOD}
    template = ChatTemplate(tokenizer, dataclasses.replace(model, thinking="auto"))
    of_model = {name: getattr(model, name) for name in ("chat_template_kwargs", "thinking")}
    # Such a template may write today's date into a prompt.
    today = str(date.today()) if "strftime_now" in template.source else ""
    words = [version("agentrl"), of_data, of_method, of_model, template.source, tokenizer.special_tokens_map, today]
    digest = hashlib.sha256(json.dumps(words, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for part in (*examples.parts, examples.held_out):
        digest.update(f"{len(part)}\n".encode())
        for example in part:
            digest.update(json.dumps(_contents(example), default=repr).encode())
    return digest.hexdigest()


def _contents(example: Example) -> list[Any]:
    return [type(example).__name__, *(getattr(example, name) for name in FIELDS[type(example)])]


FIELDS: dict[type[Any], list[str]] = {
    kind: [field.name for field in dataclasses.fields(kind) if field.compare] for kind in (Chat, Answer, Text, Pair, Labelled, Steps)
}
"""The contents of examples; where they come from is none of them."""
