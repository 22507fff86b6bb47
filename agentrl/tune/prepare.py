"""From checked settings to rows of token ids: the models that are named, the examples encoded, the length of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.assets import model_path
from agentrl.config.tune import MethodConfig, TuneDataConfig, TuneRunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.process import without_collections
from agentrl.core.tokenizers import load_tokenizer
from agentrl.env.plan import ImageConfig
from agentrl.rollout.images import ImageReader, open_reader
from agentrl.rollout.plan import ModelConfig
from agentrl.rollout.template import ChatTemplate
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples
from agentrl.tune.encode import Encoder, render
from agentrl.tune.row_cache import Kept, cached
from agentrl.tune.row_table import Row, as_rows, fingerprint

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

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows to train on, by source."""
        return [len(part) for part in self.parts]


def prepare(examples: Examples, data: TuneDataConfig, model: ModelConfig, images: ImageConfig, method: MethodConfig) -> Prepared:
    """Make token ids of the examples.

    Raises:
        DataError: If the chat template refuses one, or all are too long.
    """
    tokenizer = make_tokenizer(model, data.eos_token)

    def make() -> Kept:
        codec, reader = TextCodec(tokenizer), image_reader(model, images)
        encoder, evaluation = (Encoder(codec, data, model, method, reader) for _ in range(2))
        return _encoded(examples, encoder, evaluation, data)

    with without_collections():
        found = cached(examples, tokenizer, data, model, method, make)
    notes = found.notes
    samples, ends = tuple(notes["samples"]), tuple(notes["ends"])
    return Prepared(found.parts, found.held_out, notes["counts"], samples, ends, examples.notes, notes["fingerprint"])


def _encoded(examples: Examples, encoder: Encoder, evaluation: Encoder, data: TuneDataConfig) -> Kept:
    """Return the rows of examples, and what is noted of them."""
    parts: Any = tuple(encoder.encode(part) for part in examples.parts)
    samples = [render(encoder.codec, row) for row in parts[0][:SAMPLES]]
    held_out: Any = evaluation.encode(examples.held_out, "--eval-data") if examples.held_out else ()
    tables, held = tuple(as_rows(part) for part in parts), as_rows(held_out)
    notes = {
        "counts": {"train": asdict(encoder.counts), "eval": asdict(evaluation.counts)},
        "samples": samples,
        "ends": [token for token, _ in encoder.ends.most_common()],
        "fingerprint": fingerprint(*tables, held),
    }
    return Kept(tables, held, notes)


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
