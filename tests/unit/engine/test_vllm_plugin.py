"""Processes of vLLM end with the one that started them, and only those of an engine of ours."""

import multiprocessing
import os
import signal
import time
from importlib.metadata import entry_points

import psutil
import pytest

from agentrl.engine import vllm_plugin
from agentrl.engine.vllm_plugin import OWNED, owned

LEFT_S, STAYS_S = 10.0, 2.0


def core(pids: "multiprocessing.SimpleQueue[int]") -> None:
    """Waits, as vLLM's core does when nobody asks it anything."""
    vllm_plugin.begin()
    pids.put(os.getpid())
    time.sleep(60)


def front(pids: "multiprocessing.SimpleQueue[int]", is_owned: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    os.environ.pop(OWNED, None)
    process = spawn.Process(target=core, args=(pids,))
    if is_owned:
        with owned():
            process.start()
    else:
        process.start()
    time.sleep(60)


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_core_ends_when_its_front_end_is_killed(is_owned: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    pids = spawn.SimpleQueue()
    process = spawn.Process(target=front, args=(pids, is_owned))
    process.start()
    watched = psutil.Process(pids.get())
    try:
        process.kill()
        process.join(LEFT_S)
        if is_owned:
            watched.wait(LEFT_S)
            return
        with pytest.raises(psutil.TimeoutExpired):
            watched.wait(STAYS_S)
    finally:
        if watched.is_running():
            watched.send_signal(signal.SIGKILL)


def test_a_process_that_nobody_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    with owned():
        vllm_plugin.begin()
    assert OWNED not in os.environ


def test_vllm_finds_it_by_its_entry_point() -> None:
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "agentrl"]
    assert point.load() is vllm_plugin.begin
