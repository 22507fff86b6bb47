"""Turns that are written in channels, as gpt-oss writes them: what it thinks, what it says, and its calls are messages of their own."""

from __future__ import annotations

import re
from dataclasses import dataclass

MESSAGE = "<|message|>"
BEGINNINGS = ("<|channel|>", "to=", "<|start|>assistant", MESSAGE)
"""Texts with which a turn begins that is written in channels."""
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant")
"""Texts that end a message."""
_NEXT = re.compile(r"<\|(?:end|call|return)\|>\s*|<\|start\|>assistant")
_CALLED = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


@dataclass(frozen=True, slots=True)
class Channels:
    """One turn, taken apart."""

    reasoning: str
    text: str  # for the user
    calls: tuple[tuple[str, str], ...]  # name and arguments as they were written


def split_channels(turn: str) -> Channels | None:
    """Return the parts of a turn that is written in channels; `None` if it is not.

    A message begins with a header, which names its channel and the tool that it is sent to; ``<|message|>`` ends the header. A turn that
    begins in another way may spell these marks, as a call does whose argument is such a text.

    Args:
        turn: Text of the turn with its control tokens.
    """
    if MESSAGE not in turn or not turn.lstrip().startswith(BEGINNINGS):
        return None
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[tuple[str, str]] = []
    for part in _NEXT.split(turn):
        header, found, body = part.partition(MESSAGE)
        called, channel = _CALLED.search(header), _CHANNEL.search(header)
        if not found:
            continue
        if called is not None:
            calls.append((called[1], body.strip()))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(body)
        else:
            texts.append(body)
    return Channels("\n".join(thoughts), "\n".join(texts), tuple(calls))
