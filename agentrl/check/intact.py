"""The functions, modules and timers that the check itself needs: what user code changed of them is put back and named."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

LIBRARY = ("asyncio", "builtins", "io", "json", "os", "pickle", "signal", "subprocess", "tempfile", "threading", "time")
"""Modules of the standard library whose functions code elsewhere relies on, and so does the check."""


class Intact:
    """The state of the process when it was made, to which it can be put back."""

    def __init__(self) -> None:
        self._modules = dict(sys.modules)
        self._owners: dict[str, Any] = {name: sys.modules[name] for name in LIBRARY if name in sys.modules}
        if "json" in self._owners:
            self._owners["json.JSONEncoder"] = self._owners["json"].JSONEncoder
        self._functions = {
            name: {key: value for key, value in vars(owner).items() if callable(value)} for name, owner in self._owners.items()
        }

    def replaced(self) -> list[str]:
        """Put back functions of the standard library, and modules, that are not what they were, and return their names."""
        names = [f"sys.modules[{name!r}]" for name in LIBRARY if name in self._modules and name not in sys.modules]
        if names:
            sys.modules.update({name: module for name, module in self._modules.items() if name not in sys.modules})
        for owner, functions in self._functions.items():
            now = vars(self._owners[owner])
            changed = [key for key, value in functions.items() if now.get(key) is not value and not _of_a_package(now.get(key))]
            for key in changed:
                setattr(self._owners[owner], key, functions[key])
            names += [f"{owner}.{key}" for key in changed]
        return names

    def timer_left(self) -> float:
        """Stop the timer of SIGALRM, and return the seconds that were left of it; 0 if none ran."""
        return signal.setitimer(signal.ITIMER_REAL, 0)[0]

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the rule that is broken and a clause for each change, once it is put back."""
        if names := self.replaced():
            yield "changes-modules", f"replaced {', '.join(names[:5])}"
        if left := self.timer_left():
            yield "changes-signals", f"left a timer that would send SIGALRM {left:.2g} s later"


def _of_a_package(value: Any) -> bool:
    """Return True for an object of an installed package, some of which replace functions when they are first imported."""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    return isinstance(module, ModuleType) and "site-packages" in str(getattr(module, "__file__", ""))
