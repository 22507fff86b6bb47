"""agentrl.testing.check_engine passes for engines made from agentrl.Engine, and names what is violated."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.protocols import GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, Sampling, floats, ints
from agentrl.engine.own import load_engine_class
from agentrl.testing import check_engine
from examples.own_engine import Table


class Uniform(agentrl.Engine):
    """Samples from ten tokens, all alike; its weights decide nothing, but it takes them."""

    end_token_ids = (7,)

    def sample(self, prompt_ids: list[int], sampling: Sampling) -> tuple[Sequence[int], Sequence[float]]:
        draw = random.Random(f"{prompt_ids} {sampling.seed}")
        ids = [draw.randrange(10) for _ in range(sampling.max_tokens)]
        return ids, [math.log(0.1)] * len(ids)

    def take_weights(self, tensors: Mapping[str, Any]) -> None:
        self.names = sorted(tensors)


def test_engines_made_of_a_function_pass() -> None:
    check_engine(Uniform)
    check_engine(Table)


def test_the_engine_of_transformers_passes() -> None:
    from agentrl.engine.transformers_engine import TransformersEngine

    check_engine(TransformersEngine, max_num_seqs=8)


class Slow(Uniform):
    """Waits while it samples."""

    async def sample(self, prompt_ids: list[int], sampling: Sampling) -> Any:
        await asyncio.sleep(0.001 * sampling.max_tokens)
        return super().sample(prompt_ids, sampling)


def test_an_engine_that_waits_passes_inside_a_running_event_loop() -> None:
    async def test() -> None:
        check_engine(Slow)

    asyncio.run(test())


class Unsure(Uniform):
    def sample(self, prompt_ids: list[int], sampling: Sampling) -> Any:
        ids, _ = super().sample(prompt_ids, sampling)
        return ids, [0.5] * len(ids)


class Random(Uniform):
    def sample(self, prompt_ids: list[int], sampling: Sampling) -> Any:
        return super().sample([random.randrange(10**9)], sampling)


class Unbounded(Uniform):
    async def generate(self, request: GenerationRequest) -> Generation:
        self._alive()
        ids, logprobs = self.sample([1], request.sampling)
        return Generation(token_ids=ints(ids), logprobs=floats(logprobs), versions=ints([0] * len(ids)), finish_reason=FinishReason.LENGTH)


class Forgetful(Uniform):
    async def load_weights(self, update: WeightUpdate) -> int:
        return 0


class Immortal(Uniform):
    async def close(self) -> None:
        """Go on."""


class Lenient(Uniform):
    async def load_weights(self, update: WeightUpdate) -> int:
        self.version = update.version
        return update.version


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Unsure, "must be one finite number <= 0"),
        (Random, "what is sampled follows from prompt, seed and weights"),
        (Unbounded, "nothing is sampled behind an end token|an end token ends with"),
        (Forgetful, "load_weights returns the version, 1: 0"),
        (Immortal, r"a request after close\(\) is a EngineDeadError"),
        (Lenient, "load_weights raises WeightSyncError for what cannot be loaded"),
    ],
)
def test_a_violation_is_named(engine: type[agentrl.Engine], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_engine(engine)


FILES = {
    "Silent": ("class Silent(agentrl.Engine):\n    takes_weights = False\n", "does not say how it samples.*Define sample"),
    "Undecided": (
        "class Undecided(agentrl.Engine):\n    def sample(self, prompt_ids, sampling): ...\n",
        "neither takes the weights that are trained nor says that it does not.*takes_weights = False",
    ),
    "Partial": ("class Partial:\n    async def generate(self, request): ...\n", "no method start and no method abort.*agentrl.Engine"),
    "made": ("made = 3\n", "is a int, not a class"),
    "Bare": (
        "class Bare(agentrl.Engine):\n    takes_weights = False\n    def __init__(self): ...\n    def sample(self, a, b): ...\n",
        "must be made from one argument",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_class_that_cannot_be_an_engine_is_refused(tmp_path: Path, name: str) -> None:
    source, words = FILES[name]
    (tmp_path / f"{name}_engine.py").write_text(f"import agentrl\n{source}")
    with pytest.raises(agentrl.ConfigError, match=f"--engine.*{words}"):
        load_engine_class(f"{tmp_path / name}_engine.py:{name}")


def test_the_name_of_an_engine_is_checked_with_the_settings() -> None:
    env = str(Path(__file__).parents[2] / "envs" / "arithmetic.py")
    with pytest.raises(agentrl.ConfigError, match=r"--engine.*is not known.*Did you mean transformers"):
        agentrl.settings(env, engine="transformer")
    with pytest.raises(agentrl.ConfigError, match=r"--engine.*there is no such file"):
        agentrl.settings(env, engine="nowhere.py:Engine")
