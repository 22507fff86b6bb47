"""Models on their way into DeepSpeed: weights that are divided as they are read, tiled MLPs, and attention over several ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, UlyssesSPAttentionHF
from safetensors import safe_open
from torch import Tensor, nn

from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import placeholder_ids, shape_of, text_part
from agentrl.learner.attention import Kernel
from agentrl.learner.deepspeed.options import deepspeed_config
from agentrl.learner.sequence import SequenceGroup
from agentrl.learner.settings import LearnerSettings


@contextmanager
def loading(settings: LearnerSettings, *, trained: bool) -> Iterator[bool]:
    """Tell transformers to partition weights while loading them, if ZeRO-3 is used; yields True if they may go to the GPU at once.

    Raises:
        ConfigError: If DeepSpeed cannot divide the layers as asked.
    """
    config = settings.learner
    _layers_can_be_divided(settings)
    options = deepspeed_config(config, bf16=settings.bf16, trained=trained)
    if options["zero_optimization"]["stage"] < 3:
        yield config.learner_tensor_parallel == 1  # DeepSpeed divides layers before it moves them
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    # transformers would refuse to divide layers; DeepSpeed does so later.
    keep_alive = HfDeepSpeedConfig({name: value for name, value in options.items() if name != "tensor_parallel"})
    try:
        with nullcontext() if dist.get_rank() == 0 else only_shapes():
            yield False
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


BUFFER_BYTES = 2**20
"""Tensors of at most this size are read on every rank, since buffers are among them, which ZeRO-3 does not hand out."""


@contextmanager
def only_shapes() -> Iterator[None]:
    """Make transformers read names and shapes of tensors alone, for ranks that get their parts of parameters from the first rank.

    transformers 5 reads whole files on every rank and then gives parameters those of the first; with 8 ranks on a machine that would be
    8 copies of the model in its memory.
    """
    from transformers import modeling_utils

    read = modeling_utils.load_state_dict

    def shapes(checkpoint_file: Any, *_: Any, **__: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = read(checkpoint_file, map_location="meta")
        with safe_open(checkpoint_file, framework="pt") as file:
            return {name: file.get_tensor(name) if tensor.nbytes <= BUFFER_BYTES else tensor for name, tensor in found.items()}

    modeling_utils.load_state_dict = shapes
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


TILES = 8
"""Parts in which `--tiled-mlp` runs an MLP."""


def tile_mlps(model: nn.Module) -> bool:
    """Run the MLP of each layer over a part of the tokens at a time, by DeepSpeed's `TiledMLP`; return False if there is none."""
    mlps = [module for module in model.modules() if type(getattr(module, "down_proj", None)) is nn.Linear]
    tiled: Any = TiledMLP

    def forward(mlp: nn.Module, x: Tensor) -> Tensor:
        # Ranks gather parameters together, so every rank needs equally many parts.
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % TILES))
        output: Tensor = tiled.apply(type(mlp).forward, mlp, padded, TILES, list(mlp.parameters()))
        return output[..., : x.shape[-2], :]

    for mlp in mlps:
        mlp.forward = functools.partial(forward, mlp)
    return bool(mlps)


def register_ulysses(kernel: Kernel, group: SequenceGroup, config: Any) -> str:
    """Register the kernel inside DeepSpeed's exchange of tokens and heads with transformers, and return the name.

    Raises:
        ConfigError: If the attention heads of the model cannot be divided by the ranks.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = shape_of(config)
    heads, key_heads = shape.heads, shape.kv_heads
    if heads % group.size or (key_heads % group.size and group.size % key_heads):
        why = f"cannot divide {heads} attention heads and {key_heads} key heads"
        raise ConfigError("--sequence-parallel", group.size, why, "Use a divisor of both.")
    ulysses = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[kernel.implementation],
        batch_size=1,
        attn_head_count=heads,
        attn_head_size=shape.head_dim,
        kv_head_count=key_heads,
        num_hidden_layers=shape.layers,
        process_group=group.group,
        seq_length_is_variable=True,
    )
    name = f"{kernel.implementation}_ulysses"
    ALL_ATTENTION_FUNCTIONS.register(name, ulysses.forward)
    return name


def _layers_can_be_divided(settings: LearnerSettings) -> None:
    size = settings.learner.learner_tensor_parallel
    if size == 1:
        return
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    if placeholder_ids(config):
        why = f"cannot divide the layers of {config.model_type}, which reads images"
        raise ConfigError("--learner-tensor-parallel", size, why, "Leave it out; --zero-stage 3 divides any model.")
    text = text_part(config)
    heads, key_heads = text.get("num_attention_heads") or 0, text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
    if heads % size or key_heads % size:
        why = f"cannot divide {heads} attention heads and {key_heads} key heads"
        raise ConfigError("--learner-tensor-parallel", size, why, "Use a divisor of both.")
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None)
    try:
        known = bool(plan) and TPPlanConverter.convert(plan) is not None
    except ValueError:  # a way to divide that DeepSpeed does not have, as for experts
        known = False
    if not known:
        why = f"transformers has no plan for the layers of {config.model_type} that DeepSpeed can follow"
        raise ConfigError("--learner-tensor-parallel", size, why, "Leave it out; --zero-stage 3 divides any model.")
