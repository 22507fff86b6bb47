"""Weights on their way out: named tensors for publication, a Hugging Face directory for people."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from agentrl.core.errors import CheckpointError
from agentrl.core.files import swap_directory
from agentrl.learner.engine import whole
from agentrl.learner.models import quiet_transformers
from agentrl.learner.ranks import Ranks


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its name in the model, one at a time, tied ones once.

    Under ZeRO-3 gathering a parameter is a collective operation: every rank iterates to the end. A tensor is valid
    until the next one is asked for.
    """
    for name, parameter in model.named_parameters():
        with whole(parameter) as tensor:
            yield name, tensor


def checkpoint_names(model: Any, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights under the names, and in the pieces, in which checkpoints and inference engines have them.

    Args:
        model: The transformers model whose parameters they are.
        parameters: As from `whole_parameters`.
    """
    from transformers.core_model_loading import revert_weight_conversion

    for name, tensor in parameters:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def save_pretrained(model: Any, parameters: Iterable[tuple[str, Tensor]], tokenizer: Any, path: str | Path, ranks: Ranks) -> None:
    """Write a Hugging Face directory: complete under its name, or not there.

    Args:
        model: A transformers model: gives the configuration.
        parameters: The weights, as from `whole_parameters`; every rank calls and iterates.
        tokenizer: Written beside it.
        path: The directory; replaced if it exists.
        ranks: The first writes, all gather.

    Raises:
        CheckpointError: If it cannot be written; what was there before is intact.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in parameters:
        if ranks.first:
            state[name] = tensor.detach().to("cpu", copy=True)
    if ranks.first:
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with quiet_transformers():
                model.save_pretrained(temporary, state_dict={**state, **_buffers(model)})
                tokenizer.save_pretrained(temporary)
            swap_directory(temporary, target)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"the model cannot be written to {target}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            ranks.barrier()
    else:
        ranks.barrier()


def _buffers(model: Any) -> dict[str, Tensor]:
    """Persistent buffers, which ZeRO leaves whole."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
