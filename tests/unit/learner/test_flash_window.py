"""Windows and bounds of rows as kernels of flash attention take them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.learner import attention


def kernel(query: Any, key: Any, value: Any, begins: Any, ends: Any, longest: int, same: int, **options: Any) -> torch.Tensor:
    """What flash attention computes: a token sees `window_size[0]` tokens to its left besides itself, all of them for -1."""
    assert (options["causal"], longest) == (True, same)
    assert torch.equal(begins, ends)
    left, right = options["window_size"]
    rows = []
    for first, last in zip(begins.tolist(), begins.tolist()[1:], strict=False):
        place = torch.arange(last - first)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        assert right in (0, -1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last], key[first:last]) * options["softmax_scale"]
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value[first:last]))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_window_is_as_wide_as_the_model_says(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(11, 2, 8, generator=draw) for _ in range(3))
    bounds = torch.tensor([0, 6, 11], dtype=torch.int32)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=kernel))  # type: ignore[arg-type]
    found = attention._flash("flash_attn", query, key, value, bounds, 6, 0.3, window, None)
    expected = attention._reference(query, key, value, bounds, 6, 0.3, window, None, capped=False)
    torch.testing.assert_close(found, expected)
