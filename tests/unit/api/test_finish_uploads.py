"""The end of a run waits for its last copy, and a signal ends that wait."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.training import _finish_uploads
from agentrl.config.mapping import from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import CheckpointError
from agentrl.flow.state import StopRequest
from agentrl.flow.uploads import Uploads
from tests.unit.flow.fakes import ScriptedLearner

pytestmark = pytest.mark.anyio


def config_of(**settings: Any) -> Any:
    return from_mapping(TrainConfig, {"agent": "a.py", "stop_timeout_s": 0.2, **settings})


def behind() -> Uploads:
    """Copies that nobody makes."""
    uploads = Uploads("memory://nowhere", ScriptedLearner(), keep=1, timeout_s=20)
    uploads.offer(Path("checkpoints/step-00000003"))
    return uploads


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_signal_ends_the_wait_and_only_a_run_that_is_resumed_ends_without_an_error(
    stopped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stop = StopRequest()
    finishing = asyncio.ensure_future(_finish_uploads(behind(), config_of().training, stop, stopped=stopped))
    while not stop.heard:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not finishing.done()
    stop.ask()
    (result,) = await asyncio.wait_for(asyncio.gather(finishing, return_exceptions=True), 10)
    if stopped:
        assert result is None
        assert "could not be copied" in caplog.text
    else:
        assert isinstance(result, CheckpointError)
    assert not stop.heard


async def test_what_a_callback_asked_does_not_shorten_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.api.training.UPLOAD_TIMEOUT_S", 0.6)
    stop, begin = StopRequest(), time.monotonic()
    stop.ask("a reward of 1")
    with pytest.raises(CheckpointError, match=r"longer than 1 s"):
        await _finish_uploads(behind(), config_of().training, stop, stopped=False)
    assert time.monotonic() - begin >= 0.6
    assert not stop.signalled_s


async def test_nothing_under_way_is_not_waited_for() -> None:
    stop = StopRequest()
    stop.ask()
    await _finish_uploads(Uploads("memory://nowhere", ScriptedLearner(), keep=1, timeout_s=20), config_of().training, stop, stopped=False)
