"""Settings of low-rank adapters (LoRA)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt

from agentrl.core.errors import ConfigError
from agentrl.core.settings import Alias, Count, CountOrZero

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
    """Low-rank adapters. The model stays as it is, and small matrices beside its layers are trained."""

    lora_rank: Annotated[CountOrZero, Alias("--lora-r")] = 0
    """Rank of the matrices that are trained beside each layer, typically 8 to 64; 0 trains the model itself."""
    lora_alpha: Count = 32
    """The product of the two matrices of a layer is scaled by this over ``--lora-rank``."""
    lora_target_modules: Annotated[str, Alias("--target-modules")] = ALL_LINEAR
    """Layers with an adapter: names or their ends with commas between them, ``q_proj,v_proj``; ``all-linear``: all but the output layer."""
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each adapter's inputs that a step leaves out, the same ones for all tokens and passes of the step."""
    use_rslora: bool = False
    """Scale by ``--lora-alpha`` over the square root of the rank (rsLoRA), so that high ranks do not learn more slowly."""
    use_dora: bool = False
    """Train the length of each row of a weight apart from its direction, which A and B change (DoRA); steps take longer."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `lora_target_modules`."""
        return tuple(filter(None, map(str.strip, self.lora_target_modules.split(","))))


def check_dora(lora: LoraConfig, zero_stage: int) -> None:
    """Refuse DoRA where its layers would find only a part of a weight, whose rows they measure.

    Raises:
        ConfigError: If so.
    """
    if lora.use_dora and zero_stage == 3:
        problem = "keeps a part of each weight, and DoRA (--use-dora) measures whole rows"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --use-dora.")


def check_4bit(zero_stage: int) -> None:
    """Refuse frozen weights in 4 bits where their package is missing, or ZeRO would divide them.

    Raises:
        ConfigError: If so.
    """
    if zero_stage == 3:
        problem = "cannot spread weights in 4 bits over ranks"
        raise ConfigError("--zero-stage", 3, problem, "Use --zero-stage 2, or leave out --load-in-4bit.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("--load-in-4bit", True, "needs bitsandbytes, which is not installed", "pip install 'agentrl[qlora]'")
