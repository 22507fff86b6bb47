"""Processes of vLLM end with the one that started them, and only those of an engine of ours."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from importlib.metadata import entry_points

import psutil
import pytest

from agentrl.engine import vllm_plugin
from agentrl.engine.vllm_plugin import OWNED, owned
from tests.processes import still_runs

LEFT_S, STAYS_S = 10.0, 1.0


def core(pids: "multiprocessing.SimpleQueue[int]") -> None:
    """Waits, as vLLM's core does when nobody asks it anything."""
    vllm_plugin.begin()
    pids.put(os.getpid())
    time.sleep(60)


def front(pids: "multiprocessing.SimpleQueue[int]", is_owned: bool) -> None:
    """Starts a core on a thread that ends before it, as the event loop's are."""
    os.environ.pop(OWNED, None)
    thread = threading.Thread(target=start, args=(multiprocessing.get_context("spawn").SimpleQueue(), pids, is_owned))
    thread.start()
    thread.join()
    pids.put(0)
    time.sleep(60)


def start(begun: "multiprocessing.SimpleQueue[int]", pids: "multiprocessing.SimpleQueue[int]", is_owned: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=core, args=(begun,))
    with owned() if is_owned else contextlib.nullcontext():
        process.start()
    pids.put(begun.get())


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_core_ends_when_its_front_end_is_killed(is_owned: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    pids = spawn.SimpleQueue()
    process = spawn.Process(target=front, args=(pids, is_owned))
    process.start()
    watched = psutil.Process(pids.get())
    try:
        assert pids.get() == 0  # the thread has ended
        time.sleep(STAYS_S)
        assert still_runs(watched)
        process.kill()
        process.join(LEFT_S)
        if is_owned:
            watched.wait(LEFT_S)
            return
        with pytest.raises(psutil.TimeoutExpired):
            watched.wait(2 * STAYS_S)
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
