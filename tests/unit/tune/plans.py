"""Parts of settings and plans, in the form in which functions of `agentrl.tune` take them."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config.tune import TuneConfig
from agentrl.learner.engine import join
from agentrl.learner.state import LearnerState
from agentrl.resolve.tune import TunePlan
from agentrl.rollout.images import ImageReader
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune.data import Examples, read_examples
from agentrl.tune.directory import RunDirectory
from agentrl.tune.encode import Encoder
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.loop import start
from agentrl.tune.prepare import image_reader, make_tokenizer
from agentrl.tune.row_table import Prepared, Row
from agentrl.tune.run import encoded, read


def encoder_of(codec: TextCodec, config: TuneConfig, reader: ImageReader | None = None) -> Encoder:
    """Return the encoder of a run with these settings."""
    return Encoder(codec, config.data, config.model, config.method, reader)


def num_trained(examples: Examples) -> int:
    """Return the number of examples to train on."""
    return sum(map(len, examples.parts))


def examples_of(config: TuneConfig, form: str) -> Examples:
    """Return the examples of a run with these settings."""
    return read_examples(config.data, form, config.run.seed, config.eval)


def rows_of(plan: TunePlan) -> Prepared:
    """Return the rows of a run."""
    return encoded(plan, read(plan))


def state_of(plan: TunePlan, steps: int = 4) -> LearnerState:
    """Return the models of a run of so many steps, in this process."""
    ranks = join("torch", 0, 1, device="cpu")
    tokenizer = make_tokenizer(plan.settings.model, plan.settings.data.eos_token)
    return start(plan, Prepared((), (), {}, ()), RunDirectory(plan.run_dir, None, ()), steps, ranks, tokenizer)


def evaluated(plan: TunePlan, state: LearnerState, rows: Sequence[Row]) -> dict[str, float]:
    """Return the loss and the metrics of rows, as those of a step."""
    make = RowMaker(plan.method.command, image_reader(plan.settings.model, plan.settings.images))
    return state.evaluate_rows(0, [make(rows)])
