"""Training with an engine and a metric sink of the user's, in one process and, for the engine, in Ray's actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentrl

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "num_steps": 2,
    "groups_per_step": 4,
    "n_samples_per_prompt": 8,
    "skip_checks": ("env",),
    "tensorboard": False,
    "engine": str(ROOT / "examples" / "own_engine.py:Table"),
    "max_mismatch": "none",  # the table is not the model
}
SINK = """
import agentrl

class Lines(agentrl.Callback):
    def on_run_begin(self, event):
        self.file = (event.run_dir / "lines.txt").open("a")

    def on_metrics(self, event):
        print(event.step, event.metrics["reward/mean"], file=self.file, flush=True)

    def on_run_end(self, event):
        self.file.close()

class Fails(agentrl.Callback):
    def on_metrics(self, event):
        raise ValueError("no room")
"""


def test_two_steps_in_one_process_with_a_sink(tmp_path: Path) -> None:
    (tmp_path / "my_sinks.py").write_text(SINK)
    run = agentrl.train(
        str(ROOT / "envs" / "arithmetic.py"), **SIZES, runtime="local", run_dir=tmp_path / "run", sink=[f"{tmp_path / 'my_sinks.py'}:Lines"]
    )
    assert [row["step"] for row in run.metrics] == [1, 2]
    answers = {turn["text"] for record in run.episodes() for turn in record["turns"]}
    assert answers <= {f"{digit}{end}" for digit in "248" for end in ("", "<|end|>")}
    lines = (run.path / "lines.txt").read_text().splitlines()
    assert lines == [f"{row['step']} {row['reward/mean']}" for row in run.metrics]
    assert sorted(path.name for path in (run.path / "plugins").iterdir()) == ["my_sinks.py", "own_engine.py"]


def test_a_sink_that_fails_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "my_sinks.py").write_text(SINK)
    with pytest.raises(agentrl.CallbackError, match=r"sink Fails.on_metrics raised ValueError: no room \(my_sinks.py, line 16"):
        agentrl.train(
            str(ROOT / "envs" / "arithmetic.py"),
            **SIZES,
            runtime="local",
            run_dir=tmp_path / "run",
            sink=[f"{tmp_path / 'my_sinks.py'}:Fails"],
        )


@pytest.mark.slow
def test_two_steps_on_ray(tmp_path: Path) -> None:
    run = agentrl.train(str(ROOT / "envs" / "arithmetic.py"), **SIZES, max_staleness=1, run_dir=tmp_path / "run")
    assert run.summary["status"] == "finished"
    assert run.metrics[-1]["ledger/trained"] == 8
