"""What a person sees while a run goes on."""

import io
import math
import os
import pty
import subprocess
import sys

import pytest
from rich.console import Console

from agentrl.core.types import Status
from agentrl.track.console import make_display
from agentrl.track.display import LineDisplay, LiveDisplay, RunView
from tests.unit.track.events import judged, row


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def lines(stream, clock) -> LineDisplay:
    return LineDisplay(30, title="calculator", stream=stream, clock=clock)


def steps_printed(stream: io.StringIO) -> list[int]:
    return [int(line.split("step")[1].split("/")[0]) for line in stream.getvalue().splitlines() if "step " in line]


def test_view_times_stages_and_ends_the_last_with_the_first_group(clock, group):
    view = RunView(10, clock=clock)
    view.on_stage("starting Ray")
    clock.now += 6
    view.on_stage("loading engine")
    clock.now += 4
    assert (view.stage, view.stage_s, view.elapsed_s) == ("loading engine", 4, 10)
    view.on_group(group())
    assert view.stages == [("starting Ray", 6), ("loading engine", 4)]
    assert (view.stage, view.groups) == ("", 1)


def test_view_estimates_the_time_left_from_the_latest_steps(clock, metrics):
    view = RunView(100, clock=clock)
    view.on_step(metrics(1))
    assert math.isnan(view.eta_s)
    clock.now += 1000  # a slow step long ago no longer counts
    for step in range(2, 20):
        view.on_step(metrics(step))
        clock.now += 2
    assert view.eta_s == pytest.approx(2 * (100 - 19))


def test_view_reports_each_failure_once(clock, group):
    view = RunView(10, clock=clock)
    bad = group(Status.FINISHED, Status.ENV_ERROR, Status.ENV_ERROR, error="boom")
    assert view.on_group(bad) == ["env_error: boom"]
    assert view.on_group(bad) == []
    assert view.failed == {"env_error": 4}


def test_a_message_of_an_environment_cannot_act_on_the_terminal(lines, stream, group):
    lines.on_group_judged(judged(group(Status.ENV_ERROR, error="ValueError: \x1b[2J\x07 gone")))
    assert "\x1b" not in stream.getvalue()
    assert "ValueError: \\x1b[2J\\x07 gone" in stream.getvalue()


def test_view_keeps_few_messages(clock, group):
    view = RunView(10, clock=clock)
    shown = [view.on_group(group(Status.TIMEOUT, error=f"number {i}")) for i in range(20)]
    assert sum(map(len, shown)) == len(view.errors) == 5


def test_lines_show_stages_failures_and_steps(lines, stream, clock, metrics, group):
    lines.on_stage("loading engine")
    clock.now += 12
    lines.on_group_judged(judged(group(Status.TIMEOUT, error="step took 60 s")))
    lines.on_metrics(row(metrics(1, reward=0.625)))
    text = stream.getvalue()
    assert text.startswith("calculator\n[  0.0 s] loading engine\n[ 12.0 s] episode failed: timeout: step took 60 s\n")
    for part in ("step  1/30", "reward 0.625", "max 1", "1k tokens/s", "generator 25%", "learner 50%", "4 trained", "3 in flight"):
        assert part in text


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (80, ("step  7/30", "reward 0.700", "score ", " left"), ("tokens/s", "idle", "groups")),
        (100, ("reward 0.700", " left", "staleness ", "tokens/s"), ("groups",)),
        (160, ("reward 0.700", "tokens/s", "idle generator"), ()),
    ],
)
def test_the_line_of_a_step_fits_the_terminal_and_begins_with_what_matters_most(width, shown, left_out, stream, clock, metrics):
    display = LineDisplay(30, title="calculator", stream=stream, clock=clock, width=width)
    display.warn("a long warning " * 20)
    for step in range(1, 8):
        clock.now += 61.5
        display.on_metrics(row(metrics(step, reward=step / 10)))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(part in lines[-1] for part in shown), lines[-1]
    assert not any(part in lines[-1] for part in left_out), lines[-1]


def test_the_rows_of_the_live_display_are_whole_in_80_columns(metrics):
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    display = LiveDisplay(200, title="calculator", console=console)
    try:
        for step in range(1, 101):
            display.on_metrics(row(metrics(step, reward=step / 100)))
        text = _text(console, display)
    finally:
        display.close()
    assert "since the first steps" in text
    assert "…" not in text


def test_fast_steps_are_throttled_but_first_and_last_are_printed(lines, stream, clock, metrics):
    for step in range(1, 31):
        lines.on_metrics(row(metrics(step)))
        clock.now += 0.3
    lines.close()
    assert steps_printed(stream) == [1, 5, 9, 13, 17, 21, 25, 29, 30]


def test_slow_steps_are_all_printed(lines, stream, clock, metrics):
    for step in range(1, 31):
        lines.on_metrics(row(metrics(step)))
        clock.now += 1.0
    assert steps_printed(stream) == list(range(1, 31))


def test_the_last_step_of_a_run_that_ends_early_is_printed_at_close(lines, stream, metrics):
    for step in (1, 2, 3):
        lines.on_metrics(row(metrics(step)))
    lines.close()
    lines.close()
    assert steps_printed(stream) == [1, 3]


def test_lines_survive_missing_metrics_and_a_narrow_encoding(clock):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    display = LineDisplay(1, title="für \ud800", stream=stream, clock=clock)
    display.on_metrics(row({"step": 1.0}))
    assert b"f?r ?\n" in raw.getvalue()
    assert b"reward ?" in raw.getvalue()


def test_live_display_shows_stage_then_figures(metrics, group):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = LiveDisplay(20, title="calculator", console=console)
    try:
        display.on_stage("starting Ray")
        display.on_stage("loading engine")
        assert {"done", "starting Ray", "loading engine"} <= set(_parts(console, display))
        for step in range(1, 8):
            display.on_metrics(row(metrics(step, reward=step / 10)))
        display.on_group_judged(judged(group(Status.ENV_ERROR, error="boom")))
        text = _text(console, display)
    finally:
        display.close()
    for part in ("step 7/20", "left", "0.700", "+0.350", "mean 0.80, max 1", "generator 25%, learner 50%", "28 trained", "env_error 1"):
        assert part in text
    assert "episode failed: env_error: boom" in console.file.getvalue()


def test_live_display_fits_a_narrow_terminal(metrics):
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    display = LiveDisplay(20, title="calculator", console=console)
    try:
        display.on_metrics(row(metrics(1)))
        assert max(map(len, _text(console, display).splitlines())) <= 40
    finally:
        display.close()


def _text(console: Console, display: LiveDisplay) -> str:
    plain = Console(file=io.StringIO(), width=console.width)
    plain.print(display.render())
    return plain.file.getvalue()


def _parts(console: Console, display: LiveDisplay) -> list[str]:
    return [part.strip() for line in _text(console, display).splitlines() for part in line.split("  ")]


def test_the_cursor_comes_back_when_the_run_dies(tmp_path):
    """In a real pseudo-terminal: hidden while live, shown again although nobody called `close`."""
    code = (
        "from agentrl.track.console import make_display\n"
        "display = make_display(5, title='t')\n"
        "display.on_stage('loading')\n"
        "raise RuntimeError('engine died')\n"
    )
    output = run_in_terminal(code, TERM="xterm")
    assert "\x1b[?25l" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert "engine died" in output


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_a_terminal_that_cannot_or_should_not_redraw_gets_lines(variables):
    code = "from agentrl.track.console import make_display\nd = make_display(5, title='title')\nd.on_stage('loading')\nd.close()\n"
    output = run_in_terminal(code, **variables)
    assert output.splitlines() == ["title", "[  0.0 s] loading"]


def test_a_pipe_gets_lines():
    assert isinstance(make_display(5, title="t", console=Console(file=io.StringIO())), LineDisplay)


def run_in_terminal(code: str, **variables: str) -> str:
    inside, outside = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=outside, stdout=outside, stderr=outside, env={**environment, **variables}
    )
    os.close(outside)
    output = b""
    while chunk := _read(inside):
        output += chunk
    process.wait(timeout=60)
    os.close(inside)
    return output.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""


def test_the_last_steps_of_an_asynchronous_run_do_not_show_an_idle_machine(lines, stream, metrics):
    lines.on_metrics(row({**metrics(30), "tokens_per_s": 0.0, "idle/generator": 1.0}))
    assert "nothing left to sample" in stream.getvalue()
    assert "all steps done" in stream.getvalue()
    assert "0 tokens/s" not in stream.getvalue()
