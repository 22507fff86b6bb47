"""Rows of a training step: sequences of tokens, and the places of each whose outputs are read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.core.images import ImageInput, PlacedImage
from agentrl.core.types import FloatArray, IntArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


class Row(Protocol):
    """One sequence of L tokens, whose output is read at A places; that of a language model predicts the token behind each.

    Nothing is computed behind the last place that is read.
    """

    @property
    def tokens(self) -> IntArray:
        """Tokens, in order. # [L]."""

    @property
    def reads(self) -> IntArray:
        """Places whose output is read, ascending. # [A]."""

    @property
    def temperatures(self) -> FloatArray:
        """Temperature of the distribution at each of these places. # [A]."""

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Images among its tokens, in their order."""

    @property
    def experts(self) -> npt.NDArray[np.int16] | None:
        """Experts that each token went through in an engine; `None` if none are known. # [L - 1, layers, top_k]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRow:
    """A row of given tokens."""

    tokens: IntArray  # [L]
    reads: IntArray  # [A]
    images: tuple[PlacedImage, ...] = ()
    experts: None = None

    @property
    def temperatures(self) -> FloatArray:
        """1 at each place. # [A]."""
        return np.ones(len(self.reads), dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The rows of one step, A places of which are read in R rows; those of a group follow each other.

    Every rank holds all of this; the tokens stay in the rows, and only the rank that trains a row joins them.
    """

    rows: tuple[Row, ...]  # [R]
    row_lengths: Tensor  # [R] int64: tokens of each row
    row_actions: Tensor  # [R] int64: places of each row that are read
    row: Tensor  # [A] int64: row of each place
    paired: bool = False  # two rows that follow each other are a pair, whose rows have to be in one micro-batch

    @property
    def num_tokens(self) -> int:
        """Tokens, read or not."""
        return int(self.row_lengths.sum())

    @property
    def num_actions(self) -> int:
        """Places that are read."""
        return len(self.row)

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.rows)

    def row_group(self) -> Tensor:
        """Group of each row, from 0, a pair or the row alone: rows of one may share the tokens that they begin with. # [R] int64."""
        return torch.arange(self.num_rows) // (2 if self.paired else 1)

    def input_lengths(self) -> Tensor:
        """Tokens of each row that the model must see. # [R] int64."""
        return torch.tensor([int(row.reads[-1]) + 1 for row in self.rows])

    def experts_shape(self) -> tuple[int, ...] | None:
        """Layers and experts per token of the recorded experts; `None` if no row has any."""
        return None

    def first_image(self) -> ImageInput | None:
        """The first image of any row."""
        return next((each.image for row in self.rows for each in row.images), None)


def moved(value: D, device: torch.device) -> D:
    """Return a dataclass with its tensors on another device."""
    tensors = {f.name: part for f in fields(value) if isinstance(part := getattr(value, f.name), Tensor)}
    there: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(value, **there)
