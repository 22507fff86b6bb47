"""What processes of vLLM note before they end, and who reads it."""

from __future__ import annotations

import json
import logging
import logging.config
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engine.failures import CONFIGURATION, FailureHandler, Failures, reason_of

LOGS = {"version": 1, "disable_existing_loggers": False, "handlers": {}, "loggers": {"vllm": {"handlers": [], "level": "ERROR"}}}


@pytest.fixture
def _as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(__import__("sys").modules, "vllm.logger", SimpleNamespace(DEFAULT_LOGGING_CONFIG=LOGS))
    monkeypatch.delenv(CONFIGURATION, raising=False)
    before = logging.getLogger("vllm").handlers[:]
    yield
    logging.getLogger("vllm").handlers[:] = before


def log(message: str, error: Exception, *given: Any) -> None:
    try:
        raise error
    except Exception:
        logging.getLogger("vllm.v1").exception(message, *given)


@pytest.mark.usefixtures("_as_in_vllm")
def test_the_first_exception_that_ends_a_process_is_the_cause() -> None:
    failures = Failures()
    with failures.noted():
        configuration = json.loads(Path(os.environ[CONFIGURATION]).read_text(encoding="utf-8"))
    assert CONFIGURATION not in os.environ  # other programs are not concerned
    assert LOGS["loggers"] == {"vllm": {"handlers": [], "level": "ERROR"}}
    assert failures.cause() == ""
    logging.config.dictConfig(configuration)  # as vLLM does in each process
    log("Invocation of %s method failed", KeyError("harmless"), "sleep")
    logging.getLogger("vllm").error("EngineCore said something")
    log("WorkerProc failed to start.", TypeError("two\nlines"))
    log("EngineCore failed to start.", RuntimeError("See root cause above."))
    assert failures.cause() == "TypeError: two lines"
    folder = failures._path.parent
    failures.close()
    failures.close()
    assert failures.cause() == ""
    assert not folder.exists()


@pytest.mark.usefixtures("_as_in_vllm")
@pytest.mark.parametrize(("name", "value"), [(CONFIGURATION, "/own/logging.json"), ("VLLM_CONFIGURE_LOGGING", "0")])
def test_a_log_that_the_user_configures_stays_as_it_is(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    failures = Failures()
    with failures.noted():
        assert os.environ.get(CONFIGURATION) == (value if name == CONFIGURATION else None)
    assert os.environ[name] == value
    assert failures.cause() == ""


def test_reasons_are_one_line() -> None:
    assert reason_of(ValueError("a\n  b\nfor further information see there")) == "ValueError: a b"
    assert reason_of(KeyError()) == "KeyError: "
    assert len(reason_of(ValueError("x" * 5000))) == 612
    assert FailureHandler("/nowhere").level == logging.ERROR
