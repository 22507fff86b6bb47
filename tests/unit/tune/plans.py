"""Parts of settings and plans, in the form in which functions of `agentrl.tune` take them."""

from __future__ import annotations

from agentrl.config.tune import TuneConfig
from agentrl.resolve.tune import TunePlan
from agentrl.rollout.images import ImageReader
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples, read_examples
from agentrl.tune.encode import Encoder
from agentrl.tune.prepare import Prepared
from agentrl.tune.run import encoded, read


def encoder_of(codec: TextCodec, config: TuneConfig, reader: ImageReader | None = None) -> Encoder:
    """Return the encoder of a run with these settings."""
    return Encoder(codec, config.data, config.model, config.method, reader)


def examples_of(config: TuneConfig, form: str) -> Examples:
    """Return the examples of a run with these settings."""
    return read_examples(config.data, form, config.run.seed, config.eval)


def rows_of(plan: TunePlan) -> Prepared:
    """Return the rows of a run."""
    return encoded(plan, read(plan))
