"""An answer while the engine samples it, for clients that want it as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.env.tools.calls import held_length
from agentrl.rollout.endpoint.answers import Parts
from agentrl.rollout.endpoint.neutral import Answer, Delta
from agentrl.rollout.endpoint.splitter import AnswerSplitter

BROKEN = "\ufffd"
"""Character that stands for a part of one whose other bytes are in the next token."""


class TokenText:
    """Text of tokens that come a few at a time; a character is given out when all of its tokens are there."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens whose text is decoded again, because what follows may depend on it; all of it was given out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens, and return the text that they complete."""
        self._ids += token_ids
        before, whole = self._decode(self._ids[self._begin : self._end]), self._decode(self._ids[self._begin :])
        # Held back as long as the text ends within a character, or the new tokens change what was decoded before.
        if whole.endswith(BROKEN) or not whole.startswith(before):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return whole[len(before) :]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return a text up to the first of some stop strings, and that string; "" if the text has none of them."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    place, stop = min(found, key=lambda pair: pair[0], default=(len(text), ""))
    return text[:place], stop


class LiveAnswer:
    """Tokens of an answer on their way to its clients.

    The engine tells new tokens to `take`, which only keeps them and wakes the clients. Each client looks at `deltas`, from where it was,
    after `advance` has made pieces of what is settled. Nothing of a stop string, or of what may become one, is among them.

    Args:
        head: The answer before its first token.
        splitter: Takes the text apart.
        decode: Turns tokens into text.
        end_ids: Tokens that end an answer, and are no part of its text.
        stops: Texts that end an answer, and are no part of it.
    """

    def __init__(
        self,
        head: Answer,
        splitter: AnswerSplitter,
        *,
        decode: Callable[[Sequence[int]], str],
        end_ids: Sequence[int],
        stops: Sequence[str],
        wake: Callable[[], object],
    ) -> None:
        self.head, self.deltas = head, list[Delta]()
        self._splitter, self._text, self._end_ids, self._stops, self._wake = splitter, TokenText(decode), end_ids, stops, wake
        self._new: list[int] = []
        self._taken = 0  # tokens so far
        self._held = ""  # text that may be the beginning of a stop string
        self._is_stopped = False

    @property
    def has_begun(self) -> bool:
        """True once there is a token."""
        return self._taken > 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Keep new tokens for the next `advance`."""
        self._new += token_ids
        self._taken += len(token_ids)
        self._wake()

    def advance(self) -> None:
        """Make pieces of what is settled by the tokens so far."""
        new, self._new = self._new, []
        if new and new[-1] in self._end_ids:
            new.pop()
        if not new or self._is_stopped:
            return
        text, stop = cut_at_stop(self._held + self._text.feed(new), self._stops)
        self._is_stopped = stop != ""
        length = len(text) if self._is_stopped else len(text) - held_length(text, self._stops)
        self._held = text[length:]
        self.deltas += self._splitter.feed(text[:length])

    def end(self, token_ids: Sequence[int], sampled: str) -> Parts:
        """Return the parts of the answer, all of which are in `deltas` then.

        Args:
            token_ids: All tokens of the answer.
            sampled: Their text, without what ended it.
        """
        # An engine may not have reported the last tokens before its answer, or none.
        self._new += token_ids[self._taken :]
        self._taken = len(token_ids)
        self.advance()
        parts, deltas = self._splitter.end(sampled)
        self.deltas += deltas
        return parts
