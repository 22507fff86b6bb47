"""Digests of weights, by which an engine is compared with the learner after a publication.

A digest is the sum, modulo 2^64, of the bits of each number of a tensor times two factors that follow from its row and its column.
So the digest of a tensor that is divided over workers is the sum of theirs; numbers that are wrong, old or at another place change it; and
a GPU computes it in place, where a cryptographic hash needs the weights on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from agentrl.core.errors import WeightsDifferError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CHUNK = 2**22
"""Numbers that are taken at once; each needs some 20 bytes meanwhile."""

DIGESTS = "digests"
"""Key of the learner's digests in the payload of an update."""

Found: TypeAlias = Mapping[str, tuple[str, int]]
"""Name of a tensor in the engine -> name of the tensor of the learner that it should be, and its digest or that of a part."""

_MODULUS = 2**64


def digest(part: Tensor, dtype: torch.dtype, *, row: int = 0, column: int = 0) -> int:
    """Return the digest of a tensor, or of a rectangle of one, as numbers of `dtype`.

    Dimensions behind the first count as one, the columns.

    Args:
        part: Numbers of any type; -0.0 counts as 0.0.
        dtype: Type of the engine's numbers, in which both sides are compared.
        row: Place of the first row of the part.
        column: Place of its first column.
    """
    import torch  # not before the environment of an engine is prepared

    table = part.detach().reshape(part.shape[0] if part.ndim else 1, -1)
    rows, width = table.shape
    step, total = max(1, CHUNK // max(1, width)), 0
    across = _factors(torch.arange(column, column + width, device=part.device), 1)
    down = _factors(torch.arange(row, row + rows, device=part.device), 2)
    for start in range(0, rows, step):
        values = table[start : start + step]
        # Adding 0.0 makes 0.0 of -0.0, which has other bits.
        values = values.to(dtype) + 0.0 if values.is_floating_point() else values
        bits = values.contiguous().view(getattr(torch, f"int{8 * values.element_size()}")).long()
        total += int(((bits * across).sum(1) * down[start : start + step]).sum())
    return total % _MODULUS


def _factors(places: Tensor, kind: int) -> Tensor:
    """Odd numbers that look like chance, by the mixing of splitmix64; products and sums of int64 wrap around."""
    # PyTorch's `>>` keeps the sign, so this is not splitmix64 to the letter; learner and engine compute the same.
    mixed = (places * 2 + kind) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    # An odd factor loses no bit of a number modulo 2^64.
    return (mixed ^ (mixed >> 31)) | 1


def expected(named_tensors: Iterable[tuple[str, Tensor]], dtype: str) -> dict[str, Any]:
    """Return the digests of the learner's weights, in the form in which they travel beside a `WeightUpdate`."""
    import torch

    kind = getattr(torch, dtype)
    return {"dtype": dtype, "tensors": {name: [digest(tensor, kind), list(tensor.shape)] for name, tensor in named_tensors}}


def found_in(named_tensors: Iterable[tuple[str, Tensor]], dtype: str) -> Found:
    """Return the digests of an engine's weights that have the learner's names and shapes."""
    import torch

    kind = getattr(torch, dtype)
    return {name: (name, digest(tensor, kind)) for name, tensor in named_tensors}


def joined(parts: Iterable[Mapping[str, Any]]) -> Found:
    """Return the digests of an engine from those of its workers."""
    sums: dict[str, tuple[str, int]] = {}
    for part in parts:
        for name, (whole, value) in part.items():
            sums[name] = whole, (sums[name][1] if name in sums else 0) + int(value)
    return {name: (whole, value % _MODULUS) for name, (whole, value) in sums.items()}


def check(wanted: Mapping[str, Any], found: Found, *, engine: str, version: int) -> list[str]:
    """Compare an engine's weights with the learner's; returns the names of those of the learner that were not found in the engine.

    Raises:
        WeightsDifferError: If some differ.
    """
    tensors = wanted["tensors"]
    known = {name: (whole, value) for name, (whole, value) in found.items() if whole in tensors}
    wrong = [name for name, (whole, value) in known.items() if value != tensors[whole][0]]
    if wrong:
        names = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise WeightsDifferError(
            f"{engine}: after the publication of version {version}, {len(wrong)} of {len(known)} tensors of its weights are not the "
            f"learner's: {names}. Samples would not be those of the policy. Another --weight-transport may work; please report the model"
        )
    return sorted(tensors.keys() - {whole for whole, _ in known.values()})
