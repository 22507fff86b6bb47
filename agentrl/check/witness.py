"""State of PyTorch that all code of a process shares, and the lines of user code that change the process."""

from __future__ import annotations

import functools
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.env.boundary import user_code_of

EVENTS = {
    **dict.fromkeys(("os.chdir", "os.fchdir"), "cwd"),
    **dict.fromkeys(("os.putenv", "os.unsetenv"), "environ"),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"), "processes"),
}
"""Events that Python tells of, and what each changes."""
SETTERS = ("set_default_dtype", "set_default_device", "set_num_threads", "use_deterministic_algorithms", "set_float32_matmul_precision")
_SETTER = re.compile(rf"\b({'|'.join(SETTERS)})\(")
FIRST = {"default dtype": "torch.float32", "default device": "cpu"}
"""State of PyTorch when it has just been imported, as far as that is the same everywhere."""


def torch_state() -> dict[str, str]:
    """Return the state of PyTorch that code elsewhere relies on; nothing if it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # it may be half imported, on another thread
        return {}
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "number of threads": str(torch.get_num_threads()),
        "use of deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "precision of products of matrices": torch.get_float32_matmul_precision(),
    }


def torch_changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return in words how two states differ; before PyTorch is loaded its state is that of `FIRST`."""
    known = before or FIRST
    return [f"the {name} from {known[name]} to {value}" for name, value in after.items() if known.get(name, value) != value]


def restore_torch(state: dict[str, str]) -> None:
    """Set the state of PyTorch again."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    known = {**FIRST, **state}
    torch.set_default_dtype(getattr(torch, known["default dtype"].removeprefix("torch.")))
    torch.set_default_device(None if known["default device"] == "cpu" else known["default device"])
    if state:
        torch.set_num_threads(int(state["number of threads"]))
        torch.use_deterministic_algorithms(state["use of deterministic algorithms"] == "True")
        torch.set_float32_matmul_precision(state["precision of products of matrices"])


class Witness:
    """Remembers the line of user code that last changed something; one in a process, because hooks cannot be taken back.

    Args:
        source: File of the user.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: dict[str, str] = {}
        sys.addaudithook(self._on_event)
        self._follow(signal, "signal", "signals")
        if (torch := sys.modules.get("torch")) is not None:
            for name in SETTERS:
                self._follow(torch, name, "torch")

    def line(self, what: str) -> str:
        """Return the last line that changed something, to be put behind what was seen; empty if it is not known."""
        line = self._lines.pop(what, "") or (self._setter() if what == "torch" else "")
        return f", at {line}" if line else ""

    def _setter(self) -> str:
        """Return the first line that names a function that changes PyTorch, which was imported too late to be followed."""
        try:
            lines = Path(self._source).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        named = (
            f"{Path(self._source).name}, line {number} (`{line.strip()}`)" for number, line in enumerate(lines, 1) if _SETTER.search(line)
        )
        return next(named, "")

    def _on_event(self, event: str, _arguments: object) -> None:
        if event in EVENTS:
            self._note(EVENTS[event])

    def _note(self, what: str) -> None:
        if line := user_code_of(threading.get_ident()):
            self._lines[what] = line

    def _follow(self, module: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        @functools.wraps(function)
        def followed(*args: Any, **options: Any) -> Any:
            self._note(what)
            return function(*args, **options)

        setattr(module, name, followed)
