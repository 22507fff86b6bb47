"""Memory that one micro-batch of the learner needs beside the parameters, from shapes alone: nothing of that size is allocated.

    python -m tests.benchmarks.learner_memory

prints a line per case, ``CASE tokens=N peak_gib=X``. A case is one row of N tokens, all but the first of them sampled, forward and
backward through `PolicyModel` in bfloat16 with gradient checkpointing: two layers as wide as those of a 7B model (Qwen2.5-7B, vocabulary
152,064). The peak holds activations, gradients and temporary tensors as torch's fake tensors report them; the parameters are not counted.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHAPES = Path(__file__).parents[2] / "docs" / "models"
WIDTH_7B = json.loads((SHAPES / "qwen2.5-7b.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": True}
PLAIN = "7b-width 2-layers"
CASES = {PLAIN: WIDTH_7B | {"num_hidden_layers": 2}}
TILED = f"{PLAIN} tiled-mlp"
TOKENS = (8192, 16384, 32768)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, from the operation until the storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def ignore(self, *tensors: Tensor) -> None:
        """Leave tensors out that were there before."""
        self.ignore_storages(tensor.untyped_storage() for tensor in tensors)

    def ignore_storages(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Leave storages out that were there before."""
        for storage in storages:
            self._known[storage] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.held -= size


class _Attention(torch.autograd.Function):
    """Keeps what a kernel without a mask keeps: queries, keys, values, outputs, and a number per head and token."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, heads, tokens, _ = queries.shape
        out = queries.new_empty(rows, tokens, heads, values.shape[-1])
        ctx.save_for_backward(queries, keys, values, out, queries.new_empty(rows, heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values, *_ = ctx.saved_tensors
        return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)


SHAPES_ONLY = "shapes_only"


def register_shapes_only() -> None:
    """Make an attention known to transformers that has the memory of a kernel without a mask, and computes nothing."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    attention: Any = _Attention
    AttentionInterface.register(SHAPES_ONLY, lambda module, queries, keys, values, *_, **__: (attention.apply(queries, keys, values), None))
    AttentionMaskInterface.register(SHAPES_ONLY, lambda *_, **__: None)


def build(shape: dict[str, Any], *, dtype: torch.dtype, tiled: bool = False, kernel: str = "sdpa") -> Any:
    """The policy of a case with random weights, checkpointed as in a run."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from agentrl.learner.deepspeed.loading import tile_mlps
    from agentrl.learner.models import PolicyModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = AutoConfig.for_model(**{"model_type": "qwen2", **shape, "use_cache": False})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    finally:
        torch.set_default_dtype(before)
    if tiled:
        tile_mlps(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(model).train()


def micro_batch(tokens: int, vocabulary: int) -> Any:
    """One row, all but its first token sampled."""
    from agentrl.learner.layout import MicroBatch

    return MicroBatch(
        input_ids=torch.randint(vocabulary, (1, tokens)),
        real=torch.ones(tokens, dtype=torch.bool),
        position_ids=None,
        select=torch.arange(tokens - 1),
        targets=torch.randint(vocabulary, (tokens - 1,)),
        temperature=torch.ones(tokens - 1),
        actions=torch.arange(tokens - 1),
        num_tokens=tokens,
        num_row_tokens=tokens,
    )


def two_micro_batches(policy: Any, micro: Any) -> None:
    """Forward and backward; the second time the gradients of the first are there."""
    for _ in range(2):
        policy(micro)[0].sum().backward()


def peak_bytes(shape: dict[str, Any], tokens: int, *, dtype: torch.dtype = torch.bfloat16, tiled: bool = False) -> int:
    """Peak of a case above its parameters, on fake tensors."""
    with FakeTensorMode():
        policy, micro = build(shape, dtype=dtype, tiled=tiled), micro_batch(tokens, shape["vocab_size"])
        with PeakMemory() as memory:
            memory.ignore(*policy.parameters(), *policy.buffers())
            two_micro_batches(policy, micro)
    return memory.peak


def main() -> None:
    """Print all cases."""
    for name, shape in CASES.items():
        for tokens in TOKENS:
            print(f"{name} tokens={tokens} peak_gib={peak_bytes(shape, tokens) / 2**30:.1f}", flush=True)
    tokens = TOKENS[-1]
    print(f"{TILED} tokens={tokens} peak_gib={peak_bytes(CASES[PLAIN], tokens, tiled=True) / 2**30:.1f}")


if __name__ == "__main__":
    main()
