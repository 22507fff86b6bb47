"""Prompts of many sequences computed together, each with the same result, bit for bit, as alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from agentrl.core.types import ExpertArray
from agentrl.engine.sequences import Sequence, Slot, SlotTable, common
from agentrl.engine.slot_model import SlotModel
from agentrl.engine.slots import Step, padded

ROUND = 16
"""Sequences are computed together if they have as many new tokens, rounded up to a multiple of it."""
SCORES = 2**21
"""Scores of attention of one head, new tokens times keys, that are computed at once, unless a single sequence has more."""


@dataclass(slots=True, eq=False)
class _Placed:
    """A sequence that has a slot."""

    sequence: Sequence
    slot: int
    known: int  # tokens whose keys and values the slot holds
    experts: list[ExpertArray]  # of the known tokens, if recorded
    logits: Tensor | None  # after its last token, once known # [V]

    @property
    def new(self) -> int:
        """Return the number of tokens to compute."""
        return len(self.sequence.ids) - self.known

    @property
    def rounds(self) -> int:
        """Return the same in units of `ROUND`."""
        return -(-self.new // ROUND)


class Prefill:
    """Gives sequences slots that hold the keys and values of all of their tokens.

    A prompt that a slot holds already, or that is computed for another sequence at the same time, is copied from there; so is the common
    beginning with the longest sequence of the same session.
    """

    def __init__(self, model: SlotModel, table: SlotTable) -> None:
        self._model, self._table = model, table
        self._waiting: list[_Placed] = []  # to be computed
        self._sources: dict[int, _Placed] = {}  # slot -> which of those will be there
        self._copies: defaultdict[int, list[_Placed]] = defaultdict(list)  # slot -> what will be copied from it

    def run(self, sequences: list[Sequence]) -> Tensor:
        """Compute sequences, of which there are at most as many as free slots; returns the logits after the last token of each # [B, V]."""
        placed = [self._place(sequence) for sequence in sequences]
        self._compute()
        return torch.stack([each.logits for each in placed if each.logits is not None])

    def _place(self, sequence: Sequence) -> _Placed:
        """Take a slot, and copy what is known into it."""
        ids, table, session = sequence.marks, self._table, sequence.request.session
        fresh = len(ids) == sequence.prompt_length
        prompt = sequence.request.prompt_ids.tobytes() if fresh else b""
        if prompt and sequence.request.placed:
            # Different images have the same tokens in a prompt.
            prompt += "".join(each.image.key for each in sequence.request.placed).encode()
        same = table.with_prompt(prompt) if fresh else None
        before = same if same is not None else table.of_session(session, ids)
        # A part of that slot is to be copied, and its keys and values are not computed yet.
        if same is None and before in self._sources:
            self._compute()
        source = self._sources.get(before) if before is not None else None
        # One token at least is computed where the prompt is not known as a whole, because its logits are needed.
        known = (
            0 if before is None else len(ids) if same is not None else _outside(min(common(table[before].ids, ids), len(ids) - 1), sequence)
        )
        held = table[before] if before is not None else Slot()
        logits = held.logits if same is not None else None
        # A session goes on in its own slot; a slot with the whole prompt is spared for later requests with this prompt.
        index = table.take(prefer=before if same is None else None, keep=same)
        if before is not None and before != index and source is None:
            self._model.cache.copy(before, [index], known)
        placed = _Placed(sequence, index, known, held.experts[:known], logits)
        table.fill(index, Slot(list(ids), placed.experts, session, prompt, logits, sequence))
        sequence.slot = index
        if fresh:
            sequence.cached = known
        if source is not None:
            self._copies[source.slot].append(placed)
            self._sources[index] = source
        elif logits is None:
            self._waiting.append(placed)
            self._sources[index] = placed
        else:
            self._note(placed)
        return placed

    def _compute(self) -> None:
        """Compute and copy what waits for it."""
        for batch in self._batches():
            counts = [each.new for each in batch]
            ids = torch.zeros(len(batch), max(counts), dtype=torch.int64)
            for row, each in enumerate(batch):
                ids[row, : each.new] = torch.tensor(each.sequence.ids[each.known :])
            keys = min(padded(max(len(each.sequence.ids) for each in batch)), self._model.cache.capacity)
            places = torch.tensor([each.slot for each in batch]), torch.tensor([each.known for each in batch])
            images = [(row, each.known, each.sequence.request.placed) for row, each in enumerate(batch) if each.sequence.request.placed]
            logits, experts = self._model(ids, Step(*places, torch.tensor(counts), max(counts), keys), images)
            for each, row, new in zip(batch, logits, experts, strict=True):
                each.logits, each.experts = row, [*each.experts, *new[: each.new]]
                self._note(each)
        for slot, copies in self._copies.items():
            source = self._sources[slot]
            self._model.cache.copy(slot, [each.slot for each in copies], copies[0].known)
            for each in copies:
                each.logits, each.experts = source.logits, list(source.experts)
                self._note(each)
        self._waiting, self._sources, self._copies = [], {}, defaultdict(list)

    def _batches(self) -> Iterator[list[_Placed]]:
        """Yield sequences with about as many new tokens."""
        ordered = sorted(self._waiting, key=lambda each: (each.rounds, len(each.sequence.ids)))
        for rounds, group in groupby(ordered, key=lambda each: each.rounds):
            batch: list[_Placed] = []
            for each in group:
                if (len(batch) + 1) * rounds * ROUND * padded(len(each.sequence.ids)) > SCORES and batch:
                    yield batch
                    batch = []
                batch.append(each)
            yield batch

    def _note(self, placed: _Placed) -> None:
        """Write what was found to slot and sequence."""
        slot, sequence = self._table[placed.slot], placed.sequence
        slot.experts = placed.experts
        slot.logits = placed.logits if slot.prompt else None
        sequence.experts += placed.experts[len(sequence.experts) :]


def _outside(known: int, sequence: Sequence) -> int:
    """Return how much of a common beginning can be used: tokens of an image are computed together."""
    return next((each.place for each in sequence.request.placed if each.place < known < each.end), known)
