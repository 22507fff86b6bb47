"""The exceptions that end processes of vLLM, whose own errors only point to what these processes logged ("See root cause above")."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CONFIGURATION = "VLLM_LOGGING_CONFIG_PATH"
FATAL = ("EngineCore", "WorkerProc")
"""First words of messages that vLLM logs, with the exception, before a process of an engine ends."""


class FailureHandler(logging.Handler):
    """Adds a line to a file for each exception that ends a process of vLLM; vLLM makes it in each of its processes."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the type and message of the exception."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and str(record.msg).startswith(FATAL):
            with suppress(OSError), open(self._path, "a", encoding="utf-8") as file:  # the notes of an engine that is closed are gone
                file.write(reason_of(error) + "\n")


class Failures:
    """The exceptions of the processes that vLLM starts for one engine."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have the processes that are started within the block note why they end; not if the user configures vLLM's log."""
        if os.environ.get(CONFIGURATION) or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0":
            yield
            return
        from vllm.logger import DEFAULT_LOGGING_CONFIG

        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-vllm-", ignore_cleanup_errors=True)
        place = Path(self._folder.name, "logging.json")
        place.write_text(json.dumps(_with_handler(DEFAULT_LOGGING_CONFIG, self._path)), encoding="utf-8")
        os.environ[CONFIGURATION] = str(place)
        try:
            yield
        finally:
            os.environ.pop(CONFIGURATION, None)

    def cause(self) -> str:
        """Return the first exception that ended a process; empty if none is known."""
        try:
            return self._path.read_text(encoding="utf-8").partition("\n")[0] if self._folder else ""
        except OSError:
            return ""

    def close(self) -> None:
        """Remove the notes; safe to call twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    @property
    def _path(self) -> Path:
        return Path(self._folder.name if self._folder else "", "failures")


def _with_handler(logs: dict[str, Any], path: Path) -> dict[str, Any]:
    logs = copy.deepcopy(logs)
    logs["handlers"]["agentrl"] = {"()": f"{FailureHandler.__module__}.{FailureHandler.__qualname__}", "path": str(path)}
    logger = logs["loggers"]["vllm"]
    logger["handlers"].append("agentrl")
    if logger["level"] == "CRITICAL":  # what is not shown is noted all the same
        logger["level"] = "ERROR"
    return logs


def reason_of(error: BaseException) -> str:
    """Return the type and message of an exception on one line."""
    said = str(error.args[-1] if error.args else error).splitlines()
    # Pydantic ends its messages with a link, "For further information visit ...".
    told = " ".join(line.strip() for line in said if "further information" not in line)
    return f"{type(error).__name__}: {told[:600]}"
