"""The display in a notebook: one output, drawn again in place, in which every text is shown and none is obeyed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html.parser import HTMLParser

import pytest
from rich.console import Console

from agentrl.core.callbacks import EvaluationEnd, RunEnd
from agentrl.core.types import Status
from agentrl.track.console import make_display, open_console
from agentrl.track.html import curve, table
from agentrl.track.notebook import CellOutput, text_console
from agentrl.track.summary import SummaryBuilder, print_summary
from tests.unit.track.events import judged, row

HOSTILE = '<script>alert("x")</script>\x1b[2J'


class Shown:
    """The outputs of a cell: one data bundle for each, the newest drawing."""

    def __init__(self) -> None:
        self.outputs: list[Mapping[str, str]] = []
        self.drawn = 0

    def __call__(self, data: Mapping[str, str]) -> Shown:
        self.outputs.append(data)
        self.drawn += 1
        return self

    def update(self, data: Mapping[str, str], *, raw: bool) -> None:
        assert raw
        self.outputs[-1] = data
        self.drawn += 1

    @property
    def html(self) -> str:
        (data,) = self.outputs
        return data["text/html"]

    @property
    def plain(self) -> str:
        (data,) = self.outputs
        return data["text/plain"]


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def console(shown: Shown, clock: Callable[[], float]) -> Console:
    return text_console(CellOutput(shown, clock))


def test_a_run_is_one_output_from_its_first_stage_to_its_summary(shown, console, metrics, group, tmp_path) -> None:
    display, summary = make_display(3, title=f"env {HOSTILE}", console=console), SummaryBuilder()
    display.on_stage("loading engine")
    assert "loading engine" in shown.html
    assert "step 0/3" in shown.plain
    display.on_group_judged(judged(group(Status.ENV_ERROR, error=f"ValueError: {HOSTILE}")))
    display.warn("nothing is learned")
    for step in (1, 2, 3):
        display.on_metrics(row(metrics(step, reward=0.25 * step)))
        summary.on_metrics(row(metrics(step, reward=0.25 * step)))
    display.on_evaluation_end(EvaluationEnd(step=3, metrics={}, seconds=1.0, text="reward 0.5"))
    display.on_run_end(RunEnd(status="finished", summary={}))
    print_summary(summary.build(run_dir=tmp_path, wall_s=3.0), console=console)
    assert "step 3/3" in shown.html
    assert "finished     3 steps" in shown.html
    assert all(text in shown.plain for text in ("episode failed: env_error", "nothing is learned", "evaluation of step 3: reward 0.5"))
    parsed = Elements(shown.html)
    assert set(parsed.names) == {"div", "b", "br", "progress", "svg", "polyline", "pre"}
    assert any('<script>alert("x")</script>\\x1b[2J' in text for text in parsed.texts)


def test_quick_steps_are_drawn_now_and_then_and_the_last_one_always(shown, console, clock, metrics) -> None:
    display = make_display(100, title="t", console=console)
    before = shown.drawn
    for step in range(1, 101):
        clock.now += 0.05
        display.on_metrics(row(metrics(step)))
    assert 10 <= shown.drawn - before <= 20
    display.close()
    assert "step 100/100" in shown.html


def test_elsewhere_the_console_is_standard_output() -> None:
    assert not isinstance(open_console().file, CellOutput)


def test_cells_and_names_are_escaped() -> None:
    assert set(Elements(table(("a", HOSTILE), [(HOSTILE, 1)])).names) == {"table", "thead", "tr", "th", "tbody", "td"}
    assert set(Elements(curve([0.0, 1.0], name=HOSTILE)).names) == {"div", "svg", "polyline"}


@pytest.mark.parametrize("values", [[], [1.0], [float("nan"), 1.0]])
def test_one_value_is_no_curve(values: list[float]) -> None:
    assert curve(values, name="reward") == ""


def test_a_long_curve_is_averaged_and_a_flat_one_is_drawn() -> None:
    assert curve([float(step % 7) for step in range(10_000)], name="reward").count(",") < 300
    assert "polyline" in curve([0.5, 0.5], name="reward")
