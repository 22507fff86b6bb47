"""Settings of a learner rank; frozen, picklable, and free of torch so that any process can build them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.algo.plan import AlgoConfig
from agentrl.learner.plan import LearnerConfig, LoraConfig
from agentrl.weights.plan import WeightsConfig

CHUNK_ELEMENTS = 2**26
"""Logits held at once, unless `MIN_ROWS` rows have more; further chunks are recomputed in the backward pass."""

MIN_ROWS = 512
"""Fewest rows of a chunk, because a smaller matrix product leaves a GPU idle."""

BUCKET_ELEMENTS = 2**28
"""Most elements that DeepSpeed reduces at once."""


def chunk_rows(vocabulary: int) -> int:
    """Rows that go through the output layer together."""
    return max(MIN_ROWS, CHUNK_ELEMENTS // vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Supervised or preference training in the place of reinforcement learning."""

    name: str  # a key of `agentrl.algo.objectives.OBJECTIVES`, or a user's own as ``file.py:name``
    options: Any  # its options; of a user's own, whose class other processes may not know, a mapping with them
    reference: str = ""  # model that log-probabilities refer to; empty: the initial policy
    teacher: str = ""  # model whose distribution is learned
    packs: bool = False  # rows follow each other without padding on a CPU too, where the model allows it
    task: str = "CAUSAL_LM"  # of the model, a key of `agentrl.core.language_models.CLASSES`


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Settings of every rank of one learner."""

    model: str  # Hugging Face directory or hub name of the initial policy
    learner: LearnerConfig  # DeepSpeed settings
    algo: AlgoConfig  # algorithm settings
    num_steps: int  # steps of the whole run, the length of the learning rate schedule
    max_new_tokens: int  # tokens of a turn at most; the length in the aggregation ``constant``
    objective: ObjectiveSettings | None = None  # `None`: reinforcement learning
    demonstrations: Path | None = None  # folder of what is imitated beside episodes, of `agentrl.learner.demonstrations`
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters
    weights: WeightsConfig = field(default_factory=WeightsConfig)  # what engines get
    max_model_len: int = 0  # context length that the engines are asked for; 0: their own choice
    seed: int = 0  # seed of new layers
    trust_remote_code: bool = False  # allow the model's own Python code to run
    device: Literal["cpu", "cuda"] = "cpu"  # kind of device to train on
    annotations: Path | None = None  # file that gets the figures of the tokens of recorded episodes
    max_mismatch: float | None = None  # mean difference between engine and learner that ends a run, nats
    engine: str = ""  # the engine and its data type, for messages
    audit_every: int = 0  # steps between two audits; 0: none
    verify_every: int = 0  # steps between two comparisons of the engines' weights with the learner's; 0: none
    engine_dtype: str = "float32"  # data type of the engines' weights

    def __post_init__(self) -> None:
        """Replace ZeRO-0 by ZeRO-1 in bfloat16: without ZeRO, DeepSpeed sums the gradients of micro-batches in bfloat16."""
        if self.bf16 and not self.learner.zero_stage:
            object.__setattr__(self, "learner", replace(self.learner, zero_stage=1))

    @property
    def dtype(self) -> str:
        """Data type of training."""
        return self.learner.dtype(self.device)

    @property
    def bf16(self) -> bool:
        """True for training in bfloat16."""
        return self.dtype == "bfloat16"
