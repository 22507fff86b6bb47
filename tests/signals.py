"""A pytest plugin: programs that tests start handle SIGINT, also where a script runs the tests in its background.

The shell of such a script has its background jobs ignore SIGINT, and every program below them inherits that. A signal that has a
handler is back at its default in a program that is started, so the runner gets a handler that does nothing: it ignores SIGINT still.
"""

from __future__ import annotations

import signal
from types import FrameType


def pytest_configure() -> None:
    """Replace ignorance, which is inherited, by a handler, which is not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _pass_over)


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass
