"""Requests under way, and the slots of the cache that hold the keys and values of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from agentrl.core.images import PlacedImage
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import ExpertArray, Generation


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way."""

    request: GenerationRequest
    answer: Future[Generation]
    ids: list[int]  # prompt and what was sampled
    budget: int  # tokens to sample at most
    ends: frozenset[int]  # tokens that end it
    uniform: np.random.Generator  # decides what is sampled
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[ExpertArray] = field(default_factory=list)  # [layers, top_k] of each token when it was first computed, if recorded
    marks: list[int] = field(default_factory=list)  # `ids` with the tokens of images replaced by numbers that tell the images apart
    slot: int = -1
    cached: int = 0  # prompt tokens that were not computed again

    def __post_init__(self) -> None:
        self.marks = marked(self.ids, self.request.placed) if self.request.placed else self.ids

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.ids.append(token)
        if self.marks is not self.ids:
            self.marks.append(token)

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.request.prompt_ids)


@dataclass(slots=True, eq=False)
class Slot:
    """Tokens whose keys and values a slot holds; they stay after the sequence has ended, until the slot is needed."""

    ids: list[int] = field(default_factory=list)  # marks of a sequence
    experts: list[ExpertArray] = field(default_factory=list)  # [layers, top_k] of each token, if recorded
    session: str = ""
    prompt: bytes = b""  # of the sequence, if nothing had been sampled when it was computed
    logits: Tensor | None = None  # after the prompt # [V]
    owner: Sequence | None = None


class SlotTable:
    """Slots and what they hold: found by prompt or session, and taken in the order in which slots became free."""

    def __init__(self, number: int) -> None:
        self.slots = [Slot() for _ in range(number)]
        self._free = dict.fromkeys(range(number))  # in the order in which they became free
        self._prompts: dict[bytes, int] = {}  # a slot that holds the prompt; it may hold another by now

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Slot:
        return self.slots[index]

    @property
    def free(self) -> int:
        """Return the number of slots that no sequence owns."""
        return len(self._free)

    def with_prompt(self, prompt: bytes) -> int | None:
        """Return a slot that begins with just this prompt, known with its logits, or about to be."""
        index = self._prompts.get(prompt)
        return index if index is not None and self.slots[index].prompt == prompt else None

    def of_session(self, session: str, ids: list[int]) -> int | None:
        """Return the slot with the longest beginning of `ids`, among those of the session."""
        found = [(common(slot.ids, ids), index) for index, slot in enumerate(self.slots) if session and slot.session == session]
        return max(found)[1] if found and max(found)[0] else None

    def take(self, prefer: int | None, keep: int | None) -> int:
        """Return a free slot: the preferred one, or that which has been free for longest; `keep` only if there is no other."""
        index = prefer if prefer in self._free else next((index for index in self._free if index != keep), keep)
        assert index is not None
        del self._free[index]
        return index

    def fill(self, index: int, slot: Slot) -> None:
        """Put down what a taken slot holds."""
        self.slots[index] = slot
        if slot.prompt:
            self._prompts[slot.prompt] = index

    def release(self, index: int) -> None:
        """Have a slot free; what it holds stays until it is taken."""
        self.slots[index].owner = None
        self._free[index] = None

    def forget_free(self) -> None:
        """Forget what the free slots hold, and how the others may be found: no later sequence begins with what they hold."""
        self.slots = [Slot(slot.ids, slot.experts, owner=slot.owner) if slot.owner else Slot() for slot in self.slots]
        self._prompts = {}

    def resized(self, number: int) -> tuple[SlotTable, dict[int, int]]:
        """Return a table of another size and the slots that moved there, from -> to; sequences that find no place there have slot -1.

        Slots in use move first, then those that have been free for the shortest time.
        """
        table = SlotTable(number)
        used = [index for index, slot in enumerate(self.slots) if slot.owner is not None]
        keep = [index for index in (*used, *reversed(self._free)) if self.slots[index].ids][:number]
        for target, source in enumerate(keep):
            del table._free[target]
            table.fill(target, self.slots[source])
        for target in reversed(range(len(keep))):  # free ones behind those that hold nothing, in the order of before
            if table.slots[target].owner is None:
                table._free[target] = None
        for owner in (self.slots[index].owner for index in used):
            if owner is not None:
                owner.slot = -1
        for target, slot in enumerate(table.slots):
            if slot.owner is not None:
                slot.owner.slot = target
        return table, {source: target for target, source in enumerate(keep)}


def marked(ids: list[int], placed: Iterable[PlacedImage]) -> list[int]:
    """Return token ids in which those of an image are replaced by negative numbers that depend on the image."""
    marks = list(ids)
    for each in placed:
        first = -int(each.image.key[:15], 16) - 1
        marks[each.place : each.end] = [first - place for place in range(each.end - each.place)]
    return marks


def common(one: list[int], other: list[int]) -> int:
    """Return the length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
