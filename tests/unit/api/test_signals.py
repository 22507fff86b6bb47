"""Signals at a command: the second one ends it at once, says what is saved and gives the terminal back."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.api.background import ENDING_S, REPEATED_S
from agentrl.api.rewinding import saved_so_far

RUN = """
import asyncio, sys, time
from rich.console import Console
from agentrl.api.background import run_until_signal
from agentrl.track.console import make_display

async def deaf():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("deaf", flush=True)

async def work():
    display = make_display(5, title="a run", console=Console())
    display.on_stage("loading")
    print("begun", flush=True)
    {hang}

run_until_signal(work(), saved=lambda: "the checkpoint of step 3 is saved")
"""
HANGS = {"ignores cancellation": "await deaf()", "blocks the event loop": "time.sleep(600)"}


def read(descriptor: int, until: bytes, seen: bytes = b"", timeout_s: float = 60.0) -> bytes:
    deadline = time.monotonic() + timeout_s
    while until not in seen and time.monotonic() < deadline:
        try:
            seen += os.read(descriptor, 65536)
        except OSError:  # the other side is closed
            break
    return seen


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.timeout(120)
def test_the_second_signal_gives_the_terminal_back_and_says_what_is_saved(hang: str) -> None:
    inside, outside = pty.openpty()
    code = RUN.format(hang=HANGS[hang])
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=outside, stdout=outside, stderr=outside, env=environment)
    os.close(outside)
    try:
        shown = read(inside, b"begun")
        process.send_signal(signal.SIGINT)
        if hang == "ignores cancellation":
            shown = read(inside, b"deaf", shown)
            assert b"once more to force" in shown
        else:
            time.sleep(0.5)
        time.sleep(REPEATED_S)
        process.send_signal(signal.SIGINT)
        shown = read(inside, b"is saved", shown)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait(30)
        os.close(inside)
    assert b"agentrl: forced to end; the checkpoint of step 3 is saved" in shown
    assert b"\x1b[?25l" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


TOLD = """
import asyncio, sys, threading
from agentrl.api import background
from agentrl.flow.state import StopRequest
background.ENDING_S = 3.0
stop = StopRequest()

async def work():
    stop.heard = True
    print("begun", flush=True)
    await stop.wait()
    await asyncio.sleep(1.5)
    print("saved", flush=True)

def stuck():
    threading.Event().wait(600)

async def never_ends():
    print("begun", flush=True)
    await asyncio.to_thread(stuck)

background.run_until_signal({work}, stop, 3.0)
"""


def test_timeout_which_signals_the_process_and_its_group_ends_a_run_in_order() -> None:
    words = ["timeout", "600", sys.executable, "-c", TOLD.format(work="work()")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)  # it passes that on, to the process and then to the group
        output, errors = process.communicate(timeout=60)
    assert output == b"saved\n"
    assert b"forced" not in errors


def test_the_same_signal_again_within_a_second_counts_once_and_another_one_does_not() -> None:
    for second, forced in ((signal.SIGTERM, False), (signal.SIGINT, True)):
        with subprocess.Popen(
            [sys.executable, "-c", TOLD.format(work="work()")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            process.send_signal(second)
            output, errors = process.communicate(timeout=30)
        assert (b"saved" in output) is not forced
        assert (b"forced to end" in errors) is forced


def test_one_signal_ends_a_command_that_waits_for_a_library_for_ever() -> None:
    assert ENDING_S < 15  # with the 15 seconds that a step has by default: less than 30
    with subprocess.Popen(
        [sys.executable, "-c", TOLD.format(work="never_ends()")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - begin < 10
    assert b"forced to end" in errors


def test_what_is_saved_is_said_with_the_command_that_goes_on(tmp_path: Path) -> None:
    assert saved_so_far(None) == saved_so_far(tmp_path / "none") == "nothing was saved"
    assert "--save-every N" in saved_so_far(tmp_path)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert saved_so_far(tmp_path) == f"the checkpoint of step 10 is saved, continue with: agentrl train --resume {tmp_path}"
