"""Metric sinks of the user, ``--sink file.py:Name``: loaded and checked before a run, told of it beside the built-in ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from agentrl.core.callbacks import METHODS, Callback
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.track.callbacks import defines, load_callbacks, place

FLAG = "--sink"


def load_sinks(specs: Iterable[str]) -> list[type[Callback]]:
    """Import the classes that ``--sink`` names, each once, and check them; an empty name stands for no class.

    Raises:
        ConfigError: If there is no such file or class, or it cannot be a sink.
    """
    specs = list(dict.fromkeys(filter(None, specs)))
    classes = load_callbacks(specs, FLAG)
    for spec, cls in zip(specs, classes, strict=True):
        if not defines(cls, "on_metrics"):
            remedy = "Define on_metrics(self, event), or give the class to --callback."
            raise ConfigError(FLAG, spec, f"{cls.__name__} does not take metrics", remedy)
        for name in (name for name in METHODS.values() if inspect.iscoroutinefunction(getattr(cls, name, None))):
            remedy = "Write it with def, or give the class to --callback, which takes both."
            raise ConfigError(FLAG, spec, f"{cls.__name__}.{name} is asynchronous", remedy)
    return classes


class OwnSink(Callback):
    """One sink of the user, an object of which is made at the first event; errors are told with its name, its method and the line."""

    def __init__(self, cls: type[Callback]) -> None:
        self._cls = cls
        self._made: Any = None
        for name in METHODS.values():
            if defines(cls, name):
                setattr(self, name, partial(self._tell, name))

    def _tell(self, method: str, event: Any) -> None:
        if self._made is None:
            self._made = self._call("__init__", self._cls)
        self._call(method, partial(getattr(self._made, method), event))

    def _call(self, method: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            where = f"sink {self._cls.__name__}.{method}"
            raise CallbackError(f"{where} raised {type(error).__name__}: {error}{place(error, call)}") from error
