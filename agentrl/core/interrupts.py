"""Ctrl-C in the first second of the command: one line and exit code 130, where Python would show the traceback of an import.

A `KeyboardInterrupt` is no help while modules are imported: raised in a callback of the import system it is printed and lost.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from agentrl.core.exit_codes import INTERRUPTED

MESSAGE = "\nagentrl: interrupted\n"


def is_command() -> bool:
    """Return True if this process is ``agentrl`` or ``python -m agentrl``; False in its children and in programs that import it."""
    start = sys.orig_argv[1:3]
    return start == ["-m", "agentrl"] or "".join(start[:1]).rpartition("/")[2] == "agentrl"


def leave_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, unless it was started with another handler, as `nohup` and scripts do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os.write(2, MESSAGE.encode())
    os._exit(INTERRUPTED)
