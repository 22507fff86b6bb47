"""What user code changed of the process is put back and named."""

from __future__ import annotations

import json
import os
import signal
import sys
import types

from agentrl.check.intact import Intact


def test_replaced_functions_are_put_back() -> None:
    intact, real, encode = Intact(), os.getcwd, json.JSONEncoder.default
    os.getcwd = lambda: "elsewhere"
    json.JSONEncoder.default = lambda self, value: None  # type: ignore[method-assign]
    assert intact.replaced() == ["os.getcwd", "json.JSONEncoder.default"]
    assert os.getcwd is real
    assert json.JSONEncoder.default is encode
    assert intact.replaced() == []


def test_removed_modules_are_put_back() -> None:
    intact, module = Intact(), sys.modules["json"]
    del sys.modules["json"]
    assert intact.replaced() == ["sys.modules['json']"]
    assert sys.modules["json"] is module


def test_what_an_installed_package_replaces_is_left() -> None:
    intact, real = Intact(), os.getcwd
    package = types.ModuleType("some_package")
    package.__file__ = "/lib/site-packages/some_package.py"
    sys.modules["some_package"] = package

    def replaced() -> str:
        return ""

    replaced.__module__ = "some_package"
    os.getcwd = replaced
    try:
        assert intact.replaced() == []
        assert os.getcwd is replaced
    finally:
        os.getcwd = real
        del sys.modules["some_package"]


def test_a_timer_is_stopped_and_named() -> None:
    intact, before = Intact(), signal.signal(signal.SIGALRM, signal.SIG_IGN)
    own = signal.setitimer(signal.ITIMER_REAL, 50.0, 3.0)  # that of the test's deadline
    try:
        assert list(intact.changes()) == [("changes-signals", "left a timer that would send SIGALRM 50 s later")]
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert list(intact.changes()) == []
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *own)
