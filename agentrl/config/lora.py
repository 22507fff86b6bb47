"""Settings of low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from agentrl.core.settings import Alias, Count, CountOrZero

ALL_LINEAR = "all-linear"


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
