"""Rows of a chat as text that grows turn by turn, and their tokens, which are made for many rows at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentrl.rollout.text_codec import TextCodec, shared_length
from agentrl.tune.turns import Turn, TurnRenderer

IGNORED = -100
"""Label of a token that is not trained."""
_NOTHING = array("i", [IGNORED])
SHORT, KEPT = 64, 1000
"""Characters of a text whose tokens are kept for the rows to come, and texts of which they are."""


def as_array(ids: Iterable[int] = ()) -> array[int]:
    """Return token ids as an array."""
    return array("i", ids)


class Wanted(NamedTuple):
    """Texts with their pieces, the pieces that are to be encoded, and the tokens of those that were known."""

    cut: dict[str, list[str]]
    pieces: list[str]
    again: dict[str, array[int]]


class TextBatch:
    """Texts that are wanted in tokens, encoded together: one call of a tokenizer shares them between the cores.

    Args:
        codec: The model's tokenizer.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: dict[str, array[int]] = {}  # arrays are put together ten times as fast as lists
        self._cut: dict[str, list[str]] = {}  # text -> its pieces, which are encoded
        self._known: dict[str, list[str]] = {}  # the same for the texts whose tokens are there
        self._wanted: dict[str, None] = {}
        self._again: dict[str, array[int]] = {}  # tokens that are there, and will be read once more

    def want(self, text: str) -> None:
        """Note a text."""
        if text not in self._cut:
            self._cut[text] = pieces = self._codec.segments(text)
            for piece in pieces:
                if (ids := self._ids.get(piece)) is None:
                    self._wanted[piece] = None
                else:
                    self._again[piece] = ids

    def taken(self) -> Wanted:
        """Return what has been noted since the last time."""
        wanted = Wanted(self._cut, list(self._wanted), self._again)
        self._cut, self._wanted, self._again = {}, {}, {}
        return wanted

    def put(self, wanted: Wanted, tokens: Sequence[array[int]]) -> None:
        """Take in the tokens of what was noted; of those before only short texts stay, and what is read again."""
        kept = {text: ids for text, ids in self._ids.items() if len(text) <= SHORT}
        self._ids = {**(kept if len(kept) <= KEPT else {}), **wanted.again, **dict(zip(wanted.pieces, tokens, strict=True))}
        self._known = wanted.cut

    def ids(self, text: str) -> array[int]:
        """Return the tokens of a text; one that was not noted is encoded now."""
        pieces = self._known.get(text)
        if pieces is None:
            return self._codec.encode_pieces([text])[0]
        if len(pieces) == 1:
            return self._ids[pieces[0]]
        ids = as_array()
        for piece in pieces:
            ids += self._ids[piece]
        return ids


class RowOfTurns:
    """A row that grows by text of prompts and answers.

    Text is encoded together with what stands before it, back to the last control token: a tokenizer may write a word in another way at
    the beginning of a text. Where that changes tokens which are there already, as two line breaks may, it is encoded alone.

    Args:
        codec: The model's tokenizer.
        renderer: It knows the control tokens.
        batch: Gets what is to be encoded.
        table: Control tokens that are only text, for which marks stand.
    """

    def __init__(self, codec: TextCodec, renderer: TurnRenderer, batch: TextBatch, table: Sequence[str]) -> None:
        self._codec, self._renderer, self._batch, self._table = codec, renderer, batch, table
        self._marked = any(table)
        self.text, self._last = "", 0  # where the last control token begins
        self._parts: list[tuple[str, str, str, bool]] = []  # what stands before a text, both, the text, and True if it is trained
        self.ids = as_array()
        self.ends: list[int] = []  # the last token of each answer
        self._spans: list[tuple[int, int, bool]] = []  # in tokens: begin and end of a text, and True if it is trained

    def add(self, text: str, *, trained: bool) -> None:
        """Put text at the end of the row."""
        before = self.text[self._last :]
        joint = before + text
        self._parts.append((before, joint, text, trained))
        for whole in (before, joint):
            for part in self._codec.split_marks(whole)[::2] if self._marked else [whole]:
                self._batch.want(part)
        if (found := self._renderer.last_control(text)) >= 0:
            self._last = len(self.text) + found
        self.text += text

    def finish(self) -> None:
        """Put the tokens of the texts together."""
        for before, whole, text, trained in self._parts:
            known, joint = self._encoded(before), self._encoded(whole)
            ids = joint[len(known) :] if joint[: len(known)] == known else self._encoded(text)
            self._spans.append((len(self.ids), len(self.ids) + len(ids), trained))
            self.ids += ids
            if trained and ids:
                self.ends.append(ids[-1])

    def _encoded(self, text: str) -> array[int]:
        if not self._marked:
            return self._batch.ids(text)
        ids = as_array()
        for index, part in enumerate(self._codec.split_marks(text)):
            ids += as_array(self._codec.encode_plain(self._table[int(part)])) if index % 2 else self._batch.ids(part)
        return ids

    @property
    def prompt(self) -> array[int]:
        """The tokens before the first answer."""
        return self.ids[: next(begin for begin, _, trained in self._spans if trained)]

    def labels(self, before: RowOfTurns | None, everything: bool) -> array[int]:
        """Return the label of each token; where everything is trained, tokens that begin the row before are trained there."""
        if not everything:
            labels = as_array()
            for begin, end, trained in self._spans:
                labels += self.ids[begin:end] if trained else _NOTHING * (end - begin)
            return labels
        shared = shared_length(self.ids, before.ids) if before else 0
        return _NOTHING * shared + self.ids[shared:]


def rows_of(codec: TextCodec, renderer: TurnRenderer, batch: TextBatch, turns: Iterable[Turn], table: Sequence[str]) -> list[RowOfTurns]:
    """Return the rows of turns: one whose prompt goes on with the row before joins it, another one begins a row of its own."""
    rows: list[RowOfTurns] = []
    for turn in turns:
        if not rows or not turn.prompt.startswith(rows[-1].text):
            rows.append(RowOfTurns(codec, renderer, batch, table))
        rows[-1].add(turn.prompt[len(rows[-1].text) :], trained=False)
        rows[-1].add(turn.answer, trained=True)
    return rows
