"""Credentials in words of the user, replaced before the words are stored or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
COLUMNS = frozenset(
    {
        *("input", "label", "curriculum", "prompt", "messages", "completion", "output", "text"),
        *("quality", "chosen", "rejected", "margin", "steps", "image"),
    }
)
"""Names before ``-key`` that are columns of a data set: ``--label-key answer`` holds no credential."""

VOCABULARY = frozenset({"bos-token", "eos-token", "pad-token", "unk-token"})
"""Names of tokens of a model's vocabulary."""

_NAME = r"[\w.-]*(?:key|token|secret|password|passwd|pwd|credentials?|authorization)"
_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE)
_QUERY = re.compile(rf"([?&;](?:{_NAME}|sig|signature)=)[^&\s#'\"]+", re.IGNORECASE)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{12,}"
    r"|xox[abprs]-[\w-]{8,})"
)
_BEARER = re.compile(r"\b(Bearer |Basic )[A-Za-z0-9._~+/=-]{8,}")
_FLAG = re.compile(rf"(?<![\w-])(--?{_NAME})( +|=)('[^']*'|\"[^\"]*\"|[^\s'\"]+)", re.IGNORECASE)
_VARIABLE = re.compile(rf"(?<![\w-])({_NAME})(=)('[^']*'|\"[^\"]*\"|[^\s'\"&]+)", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return a text without what looks like a credential.

    That is user information of an address, the value of a flag, variable or query whose name ends like one of a key, a token or a
    password, and strings in the form that services give to their keys.
    """
    text = _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}@", text))
    text = _VARIABLE.sub(_without_value, _FLAG.sub(_without_value, text))
    return _KNOWN.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text))


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without credentials, those included that stand after their flag and hold spaces."""
    shown: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        # A flag whose name sounds like that of a secret may be a switch, with another flag behind it.
        hidden = before.startswith("-") and "=" not in before and _is_secret(before) and not word.startswith("--")
        shown.append(HIDDEN if hidden else _without_assigned(word))
    return shown


def redacted_values(value: Any) -> Any:
    """Return a structure of mappings, lists and texts without the credentials in its texts."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: redacted_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return redacted_words(value) if all(isinstance(item, str) for item in value) else [redacted_values(item) for item in value]
    return value


def _without_assigned(word: str) -> str:
    name, equals, _ = word.partition("=")
    return f"{name}={HIDDEN}" if equals and _is_secret(name) else redacted(word)


def _without_value(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}{HIDDEN}" if _is_secret(match[1]) else match[0]


def _is_secret(name: str) -> bool:
    name = name.lstrip("-").lower().replace("_", "-").rpartition(".")[2]
    return re.fullmatch(_NAME, name) is not None and name.removesuffix("-key") not in COLUMNS and name not in VOCABULARY
