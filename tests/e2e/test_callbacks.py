"""A callback of the user on the real stack: a metric, the end after two steps, and going on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, succeeded, train

SOURCE = """
from agentrl import Callback


class Follow(Callback):
    def __init__(self):
        self.groups = 0

    def on_run_begin(self, event):
        self.began, self.path = event.step, event.run_dir / "told.txt"
        self.tell(f"begin {event.step} {event.resumed} {event.config['training']['num_steps']}")

    async def on_group_judged(self, event):
        self.groups += event.kept and len(event.rewards) == 4

    def on_step_end(self, event):
        if event.step == 2:
            self.stop("two steps are enough")
        return {"my/groups": self.groups, "my/began": self.began}

    def on_checkpoint(self, event):
        self.tell(f"checkpoint {event.step} {event.path.name}")

    def on_run_end(self, event):
        self.tell(f"end {event.status} {event.summary['steps']}")

    def tell(self, text):
        with self.path.open("a") as file:
            print(text, file=file)


class Breaks(Callback):
    def on_step_end(self, event):
        if event.step == 4:
            raise ValueError("planted")
"""


@pytest.mark.slow
def test_a_callback_adds_a_metric_stops_the_run_and_is_there_again_after_a_resumption(tmp_path: Path) -> None:
    file, run_dir = tmp_path / "follow.py", tmp_path / "run"
    file.write_text(SOURCE)
    flags = ("--callback", f"{file}:Follow", "--callback", f"{file}:Breaks", "--num-steps", "5", "--runtime", "local", *SMALL)
    first = train(run_dir, *flags)
    assert first.code == 130, first.output
    assert "stopped after 2 of 5 steps by Follow: two steps are enough" in first.output
    assert (first.summary["status"], first.summary["stop_reason"]) == ("interrupted", "Follow: two steps are enough")
    assert first.summary["callbacks"]["Follow"]["calls"] >= 12
    assert (run_dir / "plugins" / "follow.py").read_text() == SOURCE
    second = train(run_dir, *flags, "--resume", "auto")
    assert second.code == 1, second.output
    assert "callback Breaks.on_step_end raised ValueError: planted (follow.py, line 35, in on_step_end)" in second.output
    assert second.summary["status"] == "failed"
    third = succeeded(train(run_dir, *flags[:2], *flags[4:], "--resume", str(run_dir)))
    assert [(row["step"], row["my/began"]) for row in third.metrics] == [(1, 0), (2, 0), (3, 2), (4, 2), (5, 2)]
    assert third.metrics[-1]["my/groups"] == 12
    told = (run_dir / "told.txt").read_text().splitlines()
    assert told == [
        *("begin 0 False 5", "checkpoint 2 step-00000002", "end interrupted 2"),
        *("begin 2 True 5", "end failed 3"),
        *("begin 2 True 5", "end finished 5"),
    ]
