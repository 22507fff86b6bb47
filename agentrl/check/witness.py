"""State of PyTorch that all code of a process shares, and the lines of user code that change the process."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from agentrl.env.boundary import user_code_of

EVENTS = {
    **dict.fromkeys(("os.chdir", "os.fchdir"), "cwd"),
    **dict.fromkeys(("os.putenv", "os.unsetenv"), "environ"),
    **dict.fromkeys(("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen"), "processes"),
}
"""Events that Python tells of, and what each changes."""
TORCH: dict[str, tuple[str, Callable[[Any], str]]] = {
    "default dtype": ("set_default_dtype", lambda torch: str(torch.get_default_dtype())),
    "default device": ("set_default_device", lambda torch: str(torch.get_default_device())),
    "number of threads": ("set_num_threads", lambda torch: str(torch.get_num_threads())),
    "use of deterministic algorithms": ("use_deterministic_algorithms", lambda torch: str(torch.are_deterministic_algorithms_enabled())),
    "precision of products of matrices": ("set_float32_matmul_precision", lambda torch: torch.get_float32_matmul_precision()),
}
"""State of PyTorch that code elsewhere relies on, the function that changes it, and the present value."""
_first: dict[str, str] = {}  # state of PyTorch when it had just been imported


def torch_state() -> dict[str, str]:
    """Return the state of PyTorch; nothing if it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # it may be half imported, on another thread
        return {}
    return {name: value(torch) for name, (_, value) in TORCH.items()}


def torch_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of the state in which two differ; before PyTorch is loaded its state is that after its import."""
    known = before or _first
    return [name for name, value in after.items() if known.get(name, value) != value]


def in_words(changes: Iterable[str], before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return what `torch_changes` found, for people."""
    return ", ".join(f"the {name} from {(before or _first)[name]} to {after[name]}" for name in changes)


def restore_torch(before: Mapping[str, str]) -> None:
    """Set the state of PyTorch again."""
    torch, known = sys.modules.get("torch"), before or _first
    if torch is None or not known:
        return
    torch.set_default_dtype(getattr(torch, known["default dtype"].removeprefix("torch.")))
    # Not "cpu": any named device makes torch intercept each call in order to add it.
    torch.set_default_device(None if known["default device"] == "cpu" else known["default device"])
    torch.set_num_threads(int(known["number of threads"]))
    torch.use_deterministic_algorithms(known["use of deterministic algorithms"] == "True")
    torch.set_float32_matmul_precision(known["precision of products of matrices"])


class _Arrival(MetaPathFinder):
    """Calls a function when PyTorch has been imported, before the code that imports it goes on."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as without this object, and have its loader make the call in the end."""
        if fullname != "torch" or self not in sys.meta_path:
            return None
        # Removed first, or `find_spec` below would ask this object again.
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def loaded(module: ModuleType) -> None:
                load(module)
                self._call()

            spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


class Witness:
    """Remembers the line of user code that last changed something; one in a process, because hooks cannot be taken back."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        sys.addaudithook(self._on_event)
        self._follow(signal, "signal", "signals")
        if torch_state():
            self._follow_torch()
        else:
            sys.meta_path.insert(0, _Arrival(self._follow_torch))

    def line(self, what: str) -> str:
        """Return the last line that changed something, to be put behind what was seen; empty if it is not known."""
        # Taken away, so that a later finding does not name an old line.
        line = self._lines.pop(what, "")
        return f", at {line}" if line else ""

    def _on_event(self, event: str, _arguments: object) -> None:
        if event in EVENTS:
            self._note(EVENTS[event])

    def _note(self, what: str) -> None:
        if line := user_code_of(threading.get_ident(), imported=True):
            self._lines[what] = line

    def _follow_torch(self) -> None:
        _first.update(torch_state())
        for name, (setter, _) in TORCH.items():
            self._follow(sys.modules["torch"], setter, name)

    def _follow(self, module: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        @functools.wraps(function)
        def followed(*args: Any, **options: Any) -> Any:
            self._note(what)
            return function(*args, **options)

        setattr(module, name, followed)
