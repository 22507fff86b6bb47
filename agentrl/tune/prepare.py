"""From checked settings to rows of token ids: the models that are named, the examples encoded, the length of the run.

Rows are kept for other runs, under a hash of all that they follow from. Demonstrations of a run of reinforcement learning are encoded as
the rows of ``agentrl sft``, and written for its learner.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.assets import model_path
from agentrl.config.tune import MethodConfig, SftConfig, TuneDataConfig, TuneRunConfig
from agentrl.core.errors import CheckpointError, ConfigError, DataError
from agentrl.core.files import check_directory, commit_directory, temporary_directory
from agentrl.core.paths import cache_folder
from agentrl.core.process import without_collections
from agentrl.core.tokenizers import load_tokenizer
from agentrl.env.plan import ImageConfig
from agentrl.learner.demonstration_files import write_demonstrations
from agentrl.rollout.images import ImageReader, open_reader
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.tasks import context_length
from agentrl.rollout.template import ChatTemplate
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples, drawing_order, read_examples
from agentrl.tune.encode import Encoder, render
from agentrl.tune.row_table import Prepared, RowTable, as_rows, fingerprint
from agentrl.tune.row_text import IGNORED

SAMPLES = 3
"""Rows that are shown before training begins."""
MIN_EXAMPLES = 1000
"""Examples from which rows are kept: fewer are tokenised faster than they are looked up."""
KEPT = 16
"""Sets of rows that stay; the one that was not used for the longest time goes first."""
ELSEWHERE = frozenset({"data", "data_probs", "data_split", "eval_data", "eval_split", "eval_size", "bad_rows", "max_bad_rows", "shuffle"})
"""Settings of the data that do not change the tokens of an example."""
METHOD = ("train_on", "step_separator", "last_step_only")
"""Settings of methods that do."""
NOTED = ("counts", "samples", "ends", "fingerprint")
"""Fields that are kept beside the rows."""


def prepare(examples: Examples, data: TuneDataConfig, model: ModelConfig, images: ImageConfig, method: MethodConfig) -> Prepared:
    """Make token ids of the examples.

    Raises:
        DataError: If the chat template refuses one, or all are too long.
    """
    tokenizer = make_tokenizer(model, data.eos_token)

    def make() -> Prepared:
        codec, reader = TextCodec(tokenizer), image_reader(model, images)
        encoder, evaluation = (Encoder(codec, data, model, method, reader) for _ in range(2))
        parts = [encoder.encode(part) for part in examples.parts]
        samples = [render(codec, row) for row in parts[0][:SAMPLES]]
        held_out = as_rows(evaluation.encode(examples.held_out, "--eval-data") if examples.held_out else ())
        tables = tuple(map(as_rows, parts))
        counts = {"train": asdict(encoder.counts), "eval": asdict(evaluation.counts)}
        ends = [token for token, _ in encoder.ends.most_common()]
        return Prepared(tables, held_out, counts, samples, ends, fingerprint=fingerprint(*tables, held_out))

    with without_collections():
        return replace(cached(examples, tokenizer, data, model, method, make), notes=examples.notes)


def folder_of(token_cache: str) -> Path | None:
    """Return the directory of the cache; `None` without one."""
    if token_cache == "none":
        return None
    return Path(token_cache).expanduser() if token_cache else cache_folder() / "rows"


def cached(
    examples: Examples, tokenizer: Any, data: TuneDataConfig, model: ModelConfig, method: MethodConfig, make: Callable[[], Prepared]
) -> Prepared:
    """Return the rows of the examples from the cache; else make them, and keep them there.

    Rows with images are not kept, since they follow from files beside the data, and few rows are not. The others of this machine wait for
    the process that makes the rows: the ranks of a run, or runs of the same data that begin together.
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
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            # One process of this machine makes the rows; its end, whatever it is, lets go of the lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _read(folder / "tables")) is not None:
                # The time of the folder says when its rows were last used.
                os.utime(folder)
                return found
            made = make()
            if all(isinstance(rows, RowTable) for rows in (*made.parts, made.held_out)):
                _write(folder / "tables", made)
                _make_room(root, folder)
            return made
    except OSError:  # a full or read-only disk stops no run
        return make()


def _read(folder: Path) -> Prepared | None:
    try:
        check_directory(folder)
    except CheckpointError:
        return None
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    *parts, held_out = (RowTable.read(folder / str(number)) for number in range(about.pop("tables")))
    return Prepared(tuple(parts), held_out, **about)


def _write(folder: Path, made: Prepared) -> None:
    temporary = temporary_directory(folder)
    tables = (*made.parts, made.held_out)
    for number, rows in enumerate(tables):
        assert isinstance(rows, RowTable)
        rows.write(temporary / str(number))
    about = {"tables": len(tables), **{name: getattr(made, name) for name in NOTED}}
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
    of_data = {name: value for name, value in asdict(data).items() if name not in ELSEWHERE and name != "token_cache"}
    of_method = {name: getattr(method, name, None) for name in METHOD}
    template = ChatTemplate(tokenizer, replace(model, thinking="auto"))
    of_model = {name: getattr(model, name) for name in ("chat_template_kwargs", "thinking")}
    # Such a template may write today's date into a prompt.
    today = str(date.today()) if "strftime_now" in template.source else ""
    words = [version("agentrl"), of_data, of_method, of_model, template.source, tokenizer.special_tokens_map, today]
    digest = hashlib.sha256(json.dumps(words, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    for part in (*examples.parts, examples.held_out):
        digest.update(f"{len(part)}\n".encode())
        for example in part:
            digest.update(repr(example).encode())  # without its place
    return digest.hexdigest()


def image_reader(model: ModelConfig, images: ImageConfig) -> ImageReader | None:
    """Return the reader of the images of rows; `None` for a model that reads text only."""
    return open_reader(model_path(model.model), images, trust_remote_code=model.trust_remote_code)


def make_tokenizer(model: ModelConfig, end: str) -> Any:
    """Return the model's tokenizer with the user's own chat template and end token, as it is saved beside the trained model.

    Raises:
        ConfigError: If there is none, the template cannot be read, or the end token is none of its tokens.
    """
    tokenizer = load_tokenizer(model_path(model.model), trust_remote_code=model.trust_remote_code)
    if model.chat_template:
        tokenizer.chat_template = ChatTemplate(tokenizer, replace(model, thinking="auto")).source
    if end:
        if end not in tokenizer.get_vocab():
            raise ConfigError("--eos-token", end, "is no token of the model", "Name one that its tokenizer knows, for example <|im_end|>.")
        tokenizer.eos_token = end
    return tokenizer


def num_steps(run: TuneRunConfig, batch_size: int, rows: int) -> int:
    """Return the steps of a run whose epochs have so many rows.

    Raises:
        ConfigError: If there are fewer rows than one step takes.
    """
    if run.num_steps:
        return run.num_steps
    steps = int(rows * run.num_epochs // batch_size)
    if not steps:
        problem = f"is more than the {rows} rows of --num-epochs {run.num_epochs:g}"
        raise ConfigError("--batch-size", batch_size, problem, "Lower it, or give --num-epochs or --num-steps.")
    return steps


def encode_demonstrations(settings: SftConfig, max_model_len: int = 0) -> Prepared:
    """Read and encode demonstrations.

    Args:
        settings: Of ``agentrl sft``, the model of the run among them.
        max_model_len: Tokens of a row that the model reads at most; 0: as many as it states.

    Raises:
        DataError: If a row is malformed, or none is left.
        ConfigError: If a row is longer than the context of the model, or has images.
    """
    data = settings.data
    try:
        examples = read_examples(data, "dialogue", settings.run.seed, settings.eval)
        prepared = prepare(examples, data, settings.model, settings.images, settings.method)
    except DataError as error:
        field = error.field.replace("--data", "--sft-data", 1)
        raise DataError(field, error.value, error.problem, error.remedy) from None
    longest, most = prepared.counts["train"]["longest"], max_model_len or context_length(model_path(settings.model.model))
    if most and longest > most:
        problem = f"has a row of {longest} tokens, and the context of the model {most}"
        raise ConfigError("--sft-data", data.data, problem, f"Add max_length={most} behind its #, to leave out longer ones.")
    if any("images" in row for part in prepared.parts if isinstance(part, tuple) for row in part):
        raise ConfigError("--sft-data", data.data, "has rows with images, which are not imitated beside episodes", "Leave them out.")
    return prepared


def write_encoded(prepared: Prepared, settings: SftConfig, num_steps: int, folder: Path) -> None:
    """Write the rows into a folder, and which of them each step imitates; that follows from the seed, epoch after epoch."""
    size = settings.optim.batch_size
    order = drawing_order(prepared.sizes, num_steps * size, settings.data, settings.run.seed)
    rows = [(row["input_ids"], np.flatnonzero(np.asarray(row["labels"][1:]) != IGNORED)) for part in prepared.parts for row in part]
    write_demonstrations(folder, rows, np.reshape(order, (num_steps, size)).tolist())
