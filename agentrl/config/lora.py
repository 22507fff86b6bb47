"""Settings of low-rank adapters (LoRA), and the rules that they obey."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Lt

from agentrl.config.sections import Count, CountOrZero, flag
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.config.schema import TrainConfig

ALL_LINEAR = "all-linear"
NATIVE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM sets room aside for; an adapter of a lower rank than its room is filled up with zeros."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a directory that holds an adapter, as peft and vLLM name them."""


def holds_adapter(folder: Path) -> bool:
    """Return True for a directory that holds an adapter without its model."""
    return (folder / CONFIG_FILE).is_file()


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the model stays as it is, and small matrices beside its layers are trained."""

    lora_rank: CountOrZero = 0
    """Rank of the matrices that are trained beside each layer, typically 8 to 64; 0 trains the model itself."""
    lora_alpha: Count = 32
    """The product of the two matrices of a layer is scaled by this over ``--lora-rank``."""
    lora_target_modules: str = ALL_LINEAR
    """Layers with an adapter: names or their ends with commas between them, ``q_proj,v_proj``; ``all-linear``: all but the output layer."""
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each adapter's inputs that a step leaves out, the same ones for all tokens and passes of the step."""
    publish: Literal["merged", "adapter"] = "merged"
    """Form of the engines' weights: whole with the adapter ``merged`` in, or the ``adapter`` alone, which vLLM runs beside the model."""

    load_in_4bit: bool = False
    """Keep the learner's frozen weights in 4 bits (QLoRA); needs ``pip install 'agentrl[qlora]'``."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `lora_target_modules`."""
        return tuple(filter(None, map(str.strip, self.lora_target_modules.split(","))))


def check_lora(config: TrainConfig) -> None:
    """Check the settings of adapters against each other and against the settings that they exclude.

    Raises:
        ConfigError: For the first setting that has no effect, or excludes another.
    """
    lora = config.lora
    if not lora.lora_rank:
        for item in fields(lora):
            if (value := getattr(lora, item.name)) != item.default:
                raise ConfigError(flag(item.name), value, "has no effect without an adapter", "Add --lora-rank 16, or leave it out.")
        return
    if not lora.target_names:
        raise ConfigError("--lora-target-modules", lora.lora_target_modules, "names no layer", f"Leave it out for {ALL_LINEAR}.")
    if config.algo.ref_reset_every:
        problem = "cannot be done with --lora-rank: the reference is the model without its adapter"
        raise ConfigError("--ref-reset-every", config.algo.ref_reset_every, problem, "Leave one of the two out.")
    if lora.lora_dropout and config.algo.reuse_behaviour_logprobs:
        problem = "needs the log-probabilities of the model as it is in the step, and the recorded ones are of the whole adapter"
        raise ConfigError("--lora-dropout", lora.lora_dropout, problem, "Leave out --reuse-behaviour-logprobs.")
    if lora.publish == "adapter":
        _check_native(config)
    if lora.load_in_4bit:
        _check_4bit(config)


def _check_native(config: TrainConfig) -> None:
    lora = config.lora
    if config.run.ray_address:
        problem = "hands engines a directory in memory, which other machines do not see"
        raise ConfigError("--publish", lora.publish, problem, "Leave out --publish or --ray-address.")
    if lora.lora_rank > NATIVE_RANKS[-1]:
        raise ConfigError("--lora-rank", lora.lora_rank, f"is above {NATIVE_RANKS[-1]}, the most that vLLM takes", "Leave out --publish.")


def _check_4bit(config: TrainConfig) -> None:
    if config.lora.publish == "adapter":
        problem = "would leave the model in the engines whole, and the learner's in 4 bits"
        raise ConfigError("--publish", config.lora.publish, problem, "Leave out --publish or --load-in-4bit.")
    if config.learner.zero_stage == 3:
        problem = "cannot spread weights in 4 bits over ranks"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --load-in-4bit.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("--load-in-4bit", True, "needs bitsandbytes, which is not installed", "pip install 'agentrl[qlora]'")
