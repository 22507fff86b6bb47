"""An answer taken apart while it is sampled: each part is given out as soon as nothing that follows can change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from agentrl.env.tools.calls import held_length
from agentrl.env.tools.channels import BEGINNINGS, ENDS, MESSAGE, split_channels
from agentrl.rollout.endpoint.answers import AnswerParser, Marks, Parts
from agentrl.rollout.endpoint.neutral import Delta, Json


class AnswerSplitter:
    """The parts of one answer, of which `feed` gets the text piece by piece.

    What is given out is always the beginning of the parts that `end` returns, which are those of the parser for the whole text. There is
    one exception. Reasoning that nothing has opened is known by its end alone; by then it was given out as text, and it stays text. The
    same holds for anything else that a parser finds out too late.

    Args:
        parser: Reads whole answers, and says what is settled of one that is being sampled.
        tools: Tools that the answer may call; without any it has no calls.
        reasons: False for a text that is held to a structure, which has no reasoning.
        opening: Text at the end of the prompt that opened the reasoning; "" if it did not, or there is none.
        most_calls: Calls that are given out at most.
    """

    def __init__(
        self, parser: AnswerParser, tools: Sequence[Json], *, reasons: bool = True, opening: str = "", most_calls: int | None = None
    ) -> None:
        self._parser, self._tools, self._reasons, self._most_calls = parser, tools, reasons, most_calls
        self._opening = self._whole = opening
        self._used = 0  # characters that need not be looked at again
        self._step: Callable[[], Iterator[Delta]] = self._begin if reasons else self._text
        self._skips = ""  # characters that are left out before the text
        self.reasoning = self.text = ""  # as far as given out
        self.calls: list[tuple[str, str]] = []  # as far as given out; the last may lack the end of its arguments

    def feed(self, piece: str) -> list[Delta]:
        """Take the next piece of the text, and return what is settled by it."""
        self._whole += piece
        deltas, step = list[Delta](), None
        while step != self._step:  # a step that is over leaves the rest to the next
            step = self._step
            for delta in step():
                self._note(delta)
                deltas.append(delta)
        return deltas

    def end(self, sampled: str) -> tuple[Parts, list[Delta]]:
        """Return the parts of the whole text, and what was not given out of them."""
        parts = self._parser.parse(self._opening + sampled, self._tools, reasons=self._reasons)
        parts = Parts(text=parts.text, reasoning=parts.reasoning, calls=parts.calls[: self._most_calls])
        if not self._goes_on(parts):
            parts = self._as_given(sampled, parts.calls)
        deltas = list[Delta]()
        if not (self.text or self.calls):
            deltas.append(Delta("reasoning", parts.reasoning[len(self.reasoning) :]))
        deltas.append(Delta("text", parts.text[len(self.text) :]))
        if self.calls:
            deltas.append(Delta("arguments", parts.calls[len(self.calls) - 1][1][len(self.calls[-1][1]) :]))
        deltas = [delta for delta in deltas if delta.text]
        return parts, deltas + [Delta("call", name, arguments) for name, arguments in parts.calls[len(self.calls) :]]

    def _as_given(self, sampled: str, calls: tuple[tuple[str, str], ...]) -> Parts:
        """The parts as far as given out, and the calls, or without any the rest of the text."""
        calls = calls if self._calls_go_on(calls) else tuple(self.calls)
        rest = "" if calls else (self._opening + sampled)[self._used :]
        return Parts(reasoning=self.reasoning, text=self.text + rest, calls=calls)

    def _goes_on(self, parts: Parts) -> bool:
        """Return True if what was given out is the beginning of these parts; behind a text there is no reasoning but in channels."""
        is_late = bool(self.text or self.calls) and self._step != self._channels and parts.reasoning != self.reasoning
        begins = parts.reasoning.startswith(self.reasoning) and parts.text.startswith(self.text)
        return not is_late and begins and self._calls_go_on(parts.calls)

    def _calls_go_on(self, calls: Sequence[tuple[str, str]]) -> bool:
        pairs = zip(self.calls, calls, strict=False)
        alike = all(name == other and arguments.startswith(known) for (name, known), (other, arguments) in pairs)
        return alike and len(calls) >= len(self.calls)

    def _note(self, delta: Delta) -> None:
        if delta.kind == "reasoning":
            self.reasoning += delta.text
        elif delta.kind == "text":
            self.text += delta.text
        elif delta.kind == "call":
            self.calls.append((delta.text, delta.arguments or ""))
        else:
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + delta.text

    def _begin(self) -> Iterator[Delta]:
        """Find out how the answer begins; gives nothing out."""
        marks, lead = self._parser.marks, self._whole.lstrip()
        if marks is None or not lead:
            return iter(())
        if lead.startswith(marks.think):
            self._used = self._whole.index(marks.think) + len(marks.think)
            self._step = self._thought
        elif marks.has_channels and lead.startswith(BEGINNINGS):
            self._step = self._channels
        elif marks.is_text_without and not _may_begin(lead, marks):
            self._step = self._text
        return iter(())

    def _thought(self) -> Iterator[Delta]:
        """Give out reasoning without the blanks around it."""
        marks = self._parser.marks or Marks()
        rest, is_first = self._whole[self._used :], not self.reasoning
        end = rest.find(marks.thought)
        part = rest[: end if end >= 0 else len(rest) - held_length(rest, (marks.thought,))].rstrip()
        start = _lead(part) if is_first else 0
        # It may become the opening mark, which a model may write again behind that of the prompt.
        if is_first and end < 0 and marks.think.startswith(part[start:]):
            return
        if is_first and part.startswith(marks.think, start):  # written again behind that of the prompt
            start += len(marks.think)
            start += _lead(part[start:])
        if part[start:]:
            yield Delta("reasoning", part[start:])
        if end >= 0:
            self._used += end + len(marks.thought)
            self._skips, self._step = "\n", self._text
        elif part[start:]:
            self._used += len(part)

    def _text(self) -> Iterator[Delta]:
        """Give out text up to where it may be a call, and calls that are settled."""
        rest = self._whole[self._used :]
        if not self.text and self._skips:
            self._used += len(rest) - len(rest.lstrip(self._skips))
            rest = rest.lstrip(self._skips)
        used, deltas = self._settled(rest)
        self._used += used
        yield from deltas

    def _channels(self) -> Iterator[Delta]:
        """Give out what the channels hold so far; calls come at the end of the answer."""
        whole = self._whole[: len(self._whole) - held_length(self._whole, (*ENDS, MESSAGE))]
        channels = split_channels(whole)
        if channels is None:
            return
        if not self.text and len(channels.reasoning) > len(self.reasoning):
            yield Delta("reasoning", channels.reasoning[len(self.reasoning) :])
        if not channels.calls:
            yield from self._settled(channels.text[len(self.text) :], text_only=True)[1]

    def _settled(self, rest: str, *, text_only: bool = False) -> tuple[int, list[Delta]]:
        """Return how many characters of a text without reasoning are settled, and their pieces."""
        if not self._tools:
            return len(rest), [Delta("text", rest)] if rest else []
        settled = self._parser.settled(rest, self._tools, begins=not self.text, is_held=not self._reasons)
        deltas = [Delta("text", settled.text)] if settled.text and not self.calls else []
        if text_only:
            return 0, deltas
        if settled.begun is not None:
            name, arguments = settled.begun
            new = arguments[len(self.calls[0][1]) if self.calls else 0 :]
            return 0, [*([] if self.calls else [Delta("call", name)]), *([Delta("arguments", new)] if new else [])]
        room = None if self._most_calls is None else self._most_calls - len(self.calls)
        return settled.used, deltas + [Delta("call", name, arguments) for name, arguments in settled.calls[:room]]


def _lead(text: str) -> int:
    """Number of blanks at the beginning of a text."""
    return len(text) - len(text.lstrip())


def _may_begin(lead: str, marks: Marks) -> bool:
    """Return True if the beginning of an answer may be that of a mark."""
    return any(mark.startswith(lead) for mark in (marks.think, *(BEGINNINGS if marks.has_channels else ())))
