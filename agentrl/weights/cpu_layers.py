"""Linear layers of a vLLM model on the CPU: renewed after a publication, and independent of the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

Linear: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
RowPlans: TypeAlias = dict[tuple[int, int, torch.dtype], int]
"""(inputs, outputs, data type) of a layer -> fewest rows to compute at once; 0: always blocks of `BLOCK_ROWS`."""

BLOCK_ROWS = 32
_CANDIDATES = (1, 2, 4, 8, 16)
_TRIED = (1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 64, 150)
_REFERENCE_ROWS = 256


def repack_lm_heads(model: torch.nn.Module) -> None:
    """Make every output layer use its current weights.

    An output layer tied to the embeddings multiplies by a packed copy made when the model was first loaded, and vLLM's
    layer-wise reload does not renew it (seen in 0.32): samples would follow the old weights without any error.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def make_row_invariant(model: torch.nn.Module, plans: RowPlans) -> None:
    """Make each row of every linear layer's output independent of how many other rows are computed with it.

    Matrix libraries choose another kernel, with another order of summation, for few rows than for many: oneDNN does for a
    single row of more than about 1,000 inputs. A request would then get other log-probabilities alone than in a batch.
    Which row counts agree is measured once for each shape of layer and remembered in `plans`; too few rows are padded.

    Args:
        model: The model; layers that have the property already are left alone.
        plans: Filled in for new shapes; pass the same one after each publication.
    """
    for module, linear in _cpu_linears(model):
        if isinstance(linear, RowInvariantLinear):
            continue
        inputs, outputs, dtype = _shape(module)
        key = (inputs, outputs, dtype)
        if key not in plans:
            plans[key] = fewest_rows(lambda x, run=linear, layer=module: run(x, layer.weight, None), inputs, dtype)  # type: ignore[misc]
        if plans[key] != 1:
            module.cpu_linear = RowInvariantLinear(linear, plans[key])


class RowInvariantLinear:
    """A linear layer that pads its rows to at least `rows`, or always computes blocks of `BLOCK_ROWS` if `rows` is 0."""

    __slots__ = ("_linear", "_rows")

    def __init__(self, linear: Linear, rows: int) -> None:
        self._linear = linear
        self._rows = rows

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer to `x` [..., inputs], giving [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if self._rows and count >= self._rows:
            return self._linear(x, weight, bias)
        size = self._rows or BLOCK_ROWS
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -count % size))
        blocks = [self._linear(padded[start : start + size], weight, bias) for start in range(0, len(padded), size)]
        return torch.cat(blocks)[:count].reshape(*x.shape[:-1], -1)


def fewest_rows(linear: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype) -> int:
    """Smallest number of rows from which on a row's result was the same, bit for bit, however many rows there were.

    Args:
        linear: Maps [rows, inputs] to [rows, outputs].
        inputs: Width of a row.
        dtype: Data type of the rows.

    Returns:
        The number, or 0 if the result varied among large numbers of rows.
    """
    x = torch.randn(_REFERENCE_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    reference = linear(x)
    varying = [count for count in _TRIED if not torch.equal(linear(x[-count:].contiguous()), reference[-count:])]
    return next((rows for rows in _CANDIDATES if all(count < rows for count in varying)), 0)


def _cpu_linears(model: torch.nn.Module) -> Iterator[tuple[Any, Linear]]:
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is not None:
            yield module, linear


def _shape(module: Any) -> tuple[int, int, torch.dtype]:
    if isinstance(module, ParallelLMHead):
        return module.embedding_dim, module.num_embeddings_per_partition, module.weight.dtype
    inputs = getattr(module, "input_size_per_partition", module.input_size)
    outputs = getattr(module, "output_size_per_partition", module.output_size)
    return inputs, outputs, module.params_dtype
