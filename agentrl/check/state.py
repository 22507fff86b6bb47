"""Values that episodes of one process share, in the user's classes and modules: as bytes, to compare them and to put them back."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.check.context import Context

PLAIN = (bool, int, float, complex, str, bytes, list, dict, set, frozenset, tuple, deque)


def class_state(context: Context) -> dict[str, bytes]:
    """Plain values in the bodies of the user's classes and of their modules, by name, pickled."""
    values = ((name, pickled(value)) for name, _, _, value in _values(context))
    return {name: value for name, value in values if value is not None}


def restore_class_state(context: Context, state: Mapping[str, bytes]) -> None:
    """Make the values those of `class_state` again: lists, dictionaries and sets stay the objects that they are."""
    # A list, because values are set while they are looked through.
    for label, owner, name, value in list(_values(context)):
        if label not in state or pickled(value) == state[label]:
            continue
        old = pickle.loads(state[label])
        if isinstance(value, list | deque) and isinstance(old, list | deque):
            value.clear()
            value.extend(old)
        elif isinstance(value, dict | set) and isinstance(old, dict | set):
            value.clear()
            value.update(old)
        else:
            with contextlib.suppress(AttributeError, TypeError):  # a class may refuse it
                setattr(owner, name, old)


def pickled(value: Any) -> bytes | None:
    """A value as bytes, to see whether it changes; `None` if it has no such form."""
    try:
        return pickle.dumps(value)
    # The methods by which user code is pickled may raise anything.
    except Exception:
        return None


def _values(context: Context) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the name of each value for messages, its owner, its name there, and the value."""
    owners: dict[str, Any] = {cls.__name__: cls for cls in context.cls.__mro__ if not cls.__module__.startswith(("agentrl.", "builtins"))}
    module = sys.modules.get(context.cls.__module__)
    if module is not None and not module.__name__.startswith("agentrl."):
        owners[context.file] = module
    for holder, owner in owners.items():
        for name, value in list(vars(owner).items()):
            if isinstance(value, FunctionType):
                yield from ((f"{holder}.{name.strip('_')}({word}=)", value, "", default) for word, default in _defaults(value))
            elif name.startswith("__"):
                continue
            elif isinstance(value, PLAIN):
                yield f"{holder}.{name}", owner, name, value
            elif type(value).__module__ == context.cls.__module__:  # an object of a class of the user's
                attributes = getattr(value, "__dict__", {}).items()
                yield from ((f"{holder}.{name}.{key}", value, key, item) for key, item in list(attributes) if isinstance(item, PLAIN))


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Default values of a function: there is one of each for all calls."""
    words, values = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    defaults = dict(zip(words[len(words) - len(values) :], values, strict=True)) | (function.__kwdefaults__ or {})
    yield from ((word, value) for word, value in defaults.items() if isinstance(value, PLAIN))
