"""Between text and token ids: control tokens that count, and text that is only text."""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from agentrl.core.operating_system import usable_cores
from agentrl.core.types import Prompt
from agentrl.rollout.lane import Lane

BRIEF = 300
"""Characters up to which a text is encoded in less time than another thread may keep Python's lock once it has it."""
LONG = 1000
"""Characters from which a text is encoded without holding up other threads, and from which a turn of a chat is worth keeping."""
HEADS = 32
"""Long turns whose tokens are kept."""
JOINED = 8
"""Pieces of texts that are encoded as one text, which costs less than as many texts."""
TOGETHER = 64
"""Pieces that one core encodes in a call, so that what the tokenizer notes of them stays in its caches; several cores share one call."""
PIECE = 16_384
"""Characters of the pieces in which a text is counted that may be far too long."""
_MARK = re.compile("\ue000(\\d+)\ue001")


class TextCodec:
    """Turns text into token ids and back, with a tokenizer.

    Text that spells a control token ("<|im_end|>") and is to be ordinary text is replaced by a mark before it gets among control tokens
    that count, and the marks are tokenised apart.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        # The longest first: in a pattern, a token would otherwise hide a longer one that begins with it.
        self.control_tokens = sorted({*added, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)
        self._control_ids = frozenset(tokenizer.convert_tokens_to_ids(self.control_tokens))
        self._control = re.compile("|".join(map(re.escape, [*self.control_tokens, "\ue000", "\ue001"])))
        self._token = re.compile("|".join(map(re.escape, self.control_tokens)) or "(?!)")
        beginnings = {token[0] for token in self.control_tokens} | {"\ue000", "\ue001"}
        self._beginning = re.compile(f"[{re.escape(''.join(sorted(beginnings)))}]")
        self._plain = lru_cache(maxsize=256)(lambda text: tuple(self._ids(_clean(text), split_special_tokens=True)))
        self._settings = threading.Lock()  # of the tokenizer, which nobody may change while a thread encodes with it
        self._heads = lru_cache(maxsize=HEADS)(lambda text: tuple(self._ids(text)))
        self.lane = Lane()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self._tokenizer

    def encode_text(self, text: str) -> list[int]:
        """Token ids of text as it is; control tokens spelled in it count."""
        return self._ids(_clean(text))

    def encode_pieces(self, pieces: Sequence[str]) -> list[array[int]]:
        """Token ids of pieces of texts, as `segments` gives them, made on all cores; other threads go on meanwhile.

        Pieces that begin with a control token are encoded several at a time, as one text that is cut again where those tokens are.
        """
        if self._backend is None:
            return [array("i", self.encode_text(piece)) for piece in pieces]
        joined = self._joined(list(map(_clean, pieces)))
        size = TOGETHER // JOINED if usable_cores() == 1 else len(joined) or 1
        ids: list[array[int]] = []
        for at in range(0, len(joined), size):
            part = joined[at : at + size]
            with self._settings:
                if self._backend.encode_special_tokens:
                    self._backend.encode_special_tokens = False
                found = self._backend.encode_batch_fast(["".join(several) for several in part], add_special_tokens=False)
            for several, encoding in zip(part, found, strict=True):
                ids += self._cut(array("i", encoding.ids), several)
        return ids

    def _joined(self, pieces: Sequence[str]) -> list[Sequence[str]]:
        """Pieces by the text that they are encoded in; where several share one, each begins with a control token."""
        if not self._splits_at_control:
            return [[piece] for piece in pieces]
        joined: list[list[str]] = []
        open_to_more = False
        for piece in pieces:
            begins = self._token.match(piece) is not None
            if begins and open_to_more and len(joined[-1]) < JOINED:
                joined[-1].append(piece)
            else:
                joined.append([piece])
            open_to_more = begins
        return list(joined)

    def _cut(self, ids: array[int], pieces: Sequence[str]) -> list[array[int]]:
        """The token ids of each piece of a text, given those of the text."""
        if len(pieces) == 1:
            return [ids]
        places = np.flatnonzero(self._control_mask[np.frombuffer(ids, dtype=np.int32)]).tolist()
        if len(places) != len(pieces):  # a control token that text can become too, as that for unknown letters
            return [array("i", self._ids(piece)) for piece in pieces]
        return [ids[begin:end] for begin, end in itertools.pairwise([*places, len(ids)])]

    @cached_property
    def _control_mask(self) -> Any:
        """For each token id, whether it is a control token."""
        # Control tokens may have ids above the number of tokens.
        known = np.zeros(max([len(self._tokenizer), *(token + 1 for token in self._control_ids)]), dtype=bool)
        known[list(self._control_ids)] = True
        return known

    def segments(self, text: str) -> list[str]:
        """A text in pieces that begin with a control token and whose tokens are those of the text; whole where that is not certain."""
        if not self._splits_at_control:
            return [text]
        places = [found.start() for found in self._token.finditer(text)]
        return [text[begin:end] for begin, end in itertools.pairwise([0, *places, len(text)]) if end > begin]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text in which control tokens are ordinary text, as a model writes what it quotes; the latest are kept."""
        return list(self._plain(text))

    def is_plain(self, text: str) -> bool:
        """True for text that `protect` leaves as it is."""
        return (text.isascii() or _clean(text) is text) and (self._beginning.search(text) is None or self._control.search(text) is None)

    def control_in(self, text: str) -> str:
        """The first control token that is spelled in a text; "" if there is none."""
        return next((found.group() for found in self._control.finditer(text) if found.group() not in "\ue000\ue001"), "")

    def is_control(self, token: int) -> bool:
        """True for a control token."""
        return token in self._control_ids

    def fewest_tokens(self, prompt: Prompt) -> int:
        """A lower bound on the tokens of text or messages, found without encoding them, which takes long for a megabyte."""
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        return self.fewest_of(sum(len(text) for text in texts if isinstance(text, str)))

    def fewest_of(self, characters: int) -> int:
        """A lower bound on the tokens of a text with that many characters."""
        return characters // self._longest_token

    def at_least(self, texts: Iterable[str], limit: int) -> int:
        """Return a number of tokens that texts have at least; it counts no further than it takes to pass the limit.

        Pieces are counted one by one. Where they meet, a token may be cut in two, for which a tenth is taken off.
        """
        count = 0
        for text in texts:
            for start in range(0, len(text), PIECE):
                count += len(self._ids(_clean(text[start : start + PIECE])))
                if 0.9 * count > limit:
                    return int(0.9 * count)
        return int(0.9 * count)

    @cached_property
    def beginning(self) -> list[int]:
        """The token that the tokenizer puts before a text, if that is its token for the beginning."""
        return [token for token in self._tokenizer("").input_ids[:1] if token == self._tokenizer.bos_token_id]

    @cached_property
    def _longest_token(self) -> int:
        # In vocabularies of bytes each letter is a byte, so that no token stands for more characters than it has letters.
        return max(len(token) for token in self._tokenizer.get_vocab())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=False))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def protect(self, value: Any, table: list[str]) -> Any:
        """A copy of a message in which control text is replaced by marks; `table` gets what the marks stand for."""
        if isinstance(value, str):
            if self.is_plain(value):  # many times faster than the search for all tokens
                return value
            return self._control.sub(lambda found: _mark(found.group(), table), _clean(value))
        if isinstance(value, Mapping):
            return {key: self.protect(item, table) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item, table) for item in value]
        return value

    @staticmethod
    def split_marks(rendered: str) -> list[str]:
        """A text with marks as the texts between them, and the places in the table that they stand for, by turns."""
        return _MARK.split(rendered)

    def _controls(self, text: str) -> list[int]:
        return [token for token in self._ids(text) if token in self._control_ids]

    def encode_marked(self, rendered: str, table: Sequence[str], *, keeps: bool = False) -> list[int]:
        """Token ids of a text with marks, each of which is encoded apart, as plain text.

        With `keeps` those of its long turns are kept, for the next text that has the same system message and tools.
        """
        ids: list[int] = []
        for index, part in enumerate(self.split_marks(rendered)):
            if index % 2:
                ids += self._ids(table[int(part)], split_special_tokens=True)
            elif len(part) > LONG and keeps and self._splits_at_control:
                for segment in self._segments(part):
                    ids += self._heads(segment) if len(segment) > LONG else self._ids(segment)
            elif part:
                ids += self._ids(part)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        """A text in pieces that begin with a control token, as far as they are long; short ones stay together."""
        begin = 0
        for found in self._control.finditer(text):
            if found.start() - begin > LONG:
                yield text[begin : found.start()]
                begin = found.start()
        yield text[begin:]

    @cached_property
    def _splits_at_control(self) -> bool:
        """True if a text that is cut before a control token has the tokens of its pieces, as tokenizers have that strip nothing there."""
        pieces = [f"{control}{text}" for control in self.control_tokens for text in ("user\n one  ", " two\n", "three", "\n\n")]
        return self._ids("".join(pieces)) == [token for piece in pieces for token in self._ids(piece)]

    def _ids(self, text: str, **options: bool) -> list[int]:
        if self._backend is not None and not options:
            if self._backend.encode_special_tokens:  # as transformers sets it in each of its calls
                with self._settings:
                    self._backend.encode_special_tokens = False
            if len(text) <= BRIEF:  # letting other threads go on would take longer
                return list(self._backend.encode(text, add_special_tokens=False).ids)
            # A batch lets other threads go on meanwhile, and the fast one does not note where in the text each token begins.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        with self._settings:
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False, **options).input_ids)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of items with which both sequences begin."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _plain_backend(tokenizer: Any) -> Any:
    """The tokenizer's own core, if transformers only passes text on to it; called directly it takes half the time."""
    if not type(tokenizer).__module__.startswith("transformers"):
        return None
    from transformers import PreTrainedTokenizerFast

    steps = ("__call__", "_encode_plus", "decode", "_decode")
    if not all(getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name) for name in steps):
        return None
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    backend = tokenizer.backend_tokenizer
    # Limits may be saved with a tokenizer, and would cut texts or fill them up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _mark(text: str, table: list[str]) -> str:
    table.append(text)
    return f"\ue000{len(table) - 1}\ue001"


def _clean(text: str) -> str:
    """Text that can be encoded: halves of a surrogate pair are joined, single ones become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
