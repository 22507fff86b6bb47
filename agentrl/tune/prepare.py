"""From checked settings to rows of token ids: the models that are named, the examples encoded, the length of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.core.errors import ConfigError
from agentrl.core.process import without_collections
from agentrl.core.tokenizers import check_teacher, load_tokenizer
from agentrl.rollout.images import ImageReader, open_reader
from agentrl.rollout.tasks import check_model
from agentrl.rollout.template import ChatTemplate
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples, epoch_size
from agentrl.tune.encode import Encoder, pack, render
from agentrl.tune.row_cache import Kept, cached
from agentrl.tune.row_table import Row, as_rows, fingerprint
from agentrl.tune.rules import named_models, num_ranks
from agentrl.tune.settings import TuneConfig

SAMPLES = 3
"""Rows that are shown before training begins."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a run as token ids.

    Attributes:
        parts: Rows to train on, by source.
        held_out: Rows to evaluate on.
        counts: What became of the examples, for training and evaluation.
        samples: A few rows as text.
        ends: Tokens that end answers and texts, the most frequent first.
        notes: What a person is told of the sources.
        fingerprint: Hash of the rows.
    """

    parts: tuple[Sequence[Row], ...]
    held_out: Sequence[Row]
    counts: Mapping[str, Mapping[str, int]]
    samples: tuple[str, ...]
    ends: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprint: str = ""


def check_models(config: TuneConfig) -> None:
    """Check that the named models can be found, and that a teacher has the model's tokens.

    Raises:
        ConfigError: If not.
    """
    for flag, name in named_models(config):
        check_model(name, flag)
    if teacher := getattr(config.method, "teacher", ""):
        check_teacher(teacher, model_path(config), trust_remote_code=config.model.trust_remote_code)


def model_path(config: TuneConfig) -> str:
    """Return the directory or hub name of the model to train; the bundled model unless ``--model`` names one."""
    return config.model.model or str(tiny_model_path())


def prepare(config: TuneConfig, examples: Examples) -> Prepared:
    """Make token ids of the examples.

    Raises:
        DataError: If the chat template refuses one, or all are too long.
    """
    tokenizer = make_tokenizer(config)
    with without_collections():
        found = cached(config, examples, tokenizer, lambda: _encoded(config, examples, TextCodec(tokenizer)))
    notes = found.notes
    samples, ends = tuple(notes["samples"]), tuple(notes["ends"])
    return Prepared(found.parts, found.held_out, notes["counts"], samples, ends, examples.notes, notes["fingerprint"])


def _encoded(config: TuneConfig, examples: Examples, codec: TextCodec) -> Kept:
    """Return the rows of examples, and what is noted of them."""
    reader = image_reader(config)
    encoder = Encoder(codec, config, reader)
    parts: Any = tuple(encoder.encode(part) for part in examples.parts)
    samples = [render(codec, row) for row in parts[0][:SAMPLES]]
    evaluation = Encoder(codec, config, reader)
    held_out: Any = evaluation.encode(examples.held_out, "--eval-data") if examples.held_out else ()
    _check_images(config, [row for part in (*parts, held_out) for row in part])
    if getattr(config.method, "packing", False):
        parts = tuple(pack(part, config.data.max_length) for part in parts)
        held_out = pack(held_out, config.data.max_length)
    tables, held = tuple(as_rows(part) for part in parts), as_rows(held_out)
    notes = {
        "counts": {"train": asdict(encoder.counts), "eval": asdict(evaluation.counts)},
        "samples": samples,
        "ends": [token for token, _ in encoder.ends.most_common()],
        "fingerprint": fingerprint(*tables, held),
    }
    return Kept(tables, held, notes)


def image_reader(config: TuneConfig) -> ImageReader | None:
    """Return the reader of the images of rows; `None` for a model that reads text only."""
    return open_reader(model_path(config), config.images, trust_remote_code=config.model.trust_remote_code)


def _check_images(config: TuneConfig, rows: Sequence[Row]) -> None:
    """Raise `ConfigError` for rows with images that cannot be trained so."""
    with_images = sum("images" in row for row in rows)
    if with_images and getattr(config.method, "packing", False):
        raise ConfigError("--packing", True, f"cannot pack the {with_images} rows that have images", "Leave it out.")
    if 0 < with_images < len(rows) and num_ranks(config) > 1:
        problem = f"{with_images} of {len(rows)} rows have images, and ranks sum gradients of the same parameters in each step"
        raise ConfigError("--data", config.data.data, problem, "Train on one rank, or on rows that all have images.")


def make_tokenizer(config: TuneConfig) -> Any:
    """Return the model's tokenizer with the user's own chat template and end token, as it is saved beside the trained model.

    Raises:
        ConfigError: If there is none, the template cannot be read, or the end token is none of its tokens.
    """
    tokenizer = load_tokenizer(model_path(config), trust_remote_code=config.model.trust_remote_code)
    if config.model.chat_template:
        tokenizer.chat_template = ChatTemplate(tokenizer, replace(config.model, thinking="auto")).source
    if end := config.data.eos_token:
        if end not in tokenizer.get_vocab():
            raise ConfigError("--eos-token", end, "is no token of the model", "Name one that its tokenizer knows, for example <|im_end|>.")
        tokenizer.eos_token = end
    return tokenizer


def num_steps(config: TuneConfig, sizes: Sequence[int]) -> int:
    """Return the steps of a run over rows in parts of these sizes.

    Raises:
        ConfigError: If there are fewer rows than one step takes.
    """
    if config.run.num_steps:
        return config.run.num_steps
    rows = epoch_size(sizes, config)
    steps = int(rows * config.run.num_epochs // config.optim.batch_size)
    if not steps:
        problem = f"is more than the {rows} rows of --num-epochs {config.run.num_epochs:g}"
        raise ConfigError("--batch-size", config.optim.batch_size, problem, "Lower it, or give --num-epochs or --num-steps.")
    return steps
