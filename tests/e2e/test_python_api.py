"""Training, evaluating and checking from Python, for real: a script with the class in `__main__`, event loops, interrupts, a notebook."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from agentrl.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "e2e" / "api_script.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(scenario: str, folder: Path) -> subprocess.Popen[str]:
    # Whoever runs the tests in the background of a shell has interrupts ignored, and a process started then ignores them too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        words = [sys.executable, str(SCRIPT), scenario, str(folder)]
        return subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    finally:
        signal.signal(signal.SIGINT, before)


def succeeded(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Wait for the end of a script and return its output."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(process.communicate()[0]) from None
    assert process.returncode == 0, output
    assert output.endswith("done\n"), output
    return output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_trains_again_and_again_in_its_own_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = start("local", tmp_path)
    succeeded(process, 280)
    assert main(["inspect", str(tmp_path / "first")]) == 0
    assert "python:Echo" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "first"), "--all"]) == 2
    said = capsys.readouterr().err
    assert "environment.py" in said
    assert "--agent" in said
    assert main(["train", "--resume", str(tmp_path / "first"), "--num-steps", "3"]) == 2
    assert "as an object in Python code" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_script_trains_on_ray(tmp_path: Path) -> None:
    process = start("ray", tmp_path)
    succeeded(process, 280)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_script_that_has_imported_ray_trains_on_a_private_cluster(tmp_path: Path) -> None:
    process = start("ray_imported_before", tmp_path)
    succeeded(process, 180)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_interrupt_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    process = start("interrupted", tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[0])
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output = succeeded(process, 120)
    assert "finishing the step under way, then saving" in output
    assert "continue with resume=" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    begin_s = time.monotonic()
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert time.monotonic() - begin_s < 180
    (run,), (evaluation,) = tmp_path.glob("runs/Parity-*"), tmp_path.glob("runs/eval-Parity-*")
    measured = json.loads((evaluation / "eval.json").read_text())
    assert measured["tasks"] == 25
    assert measured["comparison"]["overall"]["reward"]["difference"]["low"] > 0
    assert "class Parity" in (run / "environment.py").read_text()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    for begin in ("run = agentrl.train(", "evaluation = agentrl.evaluate("):  # one output each, drawn in place
        (progress,) = next(shown for source, shown in outputs.items() if source.startswith(begin))
        assert progress.output_type == "display_data"
        assert {"text/html", "text/plain"} == set(progress.data)
    (trained,) = next(shown for source, shown in outputs.items() if source.startswith("run = "))
    assert "<svg" in trained.data["text/html"]
    assert "finished     30 steps" in trained.data["text/plain"]
    (shown,) = outputs["run"]
    assert "<svg" in shown.data["text/html"]
    assert re.search(r'<a href="http://127.0.0.1:\d+/[^"]+" target="_blank">Open in the viewer</a>', shown.data["text/html"])
    assert "<table>" in outputs["report = agentrl.check(Parity, budget_s=30)\nreport"][0].data["text/html"]
    printed, compared = outputs[next(source for source in outputs if source.startswith("difference = "))]
    assert "95% interval +0." in printed.text
    assert "95% interval" in compared.data["text/html"]
    assert sum(len(shown) for shown in outputs.values()) == 9, outputs


MAIN_GUARD = """
import multiprocessing
import agentrl

{environment}

if multiprocessing.current_process().name == "MainProcess":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    print("ended with", process.exitcode)
else:
    {call}
"""


@pytest.mark.parametrize(
    "call", ["agentrl.train(Echo)", "agentrl.evaluate(Echo)", "agentrl.check(Echo)", "agentrl.iterate('dpo', 'env.py')"]
)
def test_a_script_that_is_imported_by_its_own_process_is_told_the_remedy(tmp_path: Path, call: str) -> None:
    environment = "class Echo(agentrl.AgentInstance):\n    def step(self, state):\n        return agentrl.StepResult(0.0)"
    script = tmp_path / "script.py"
    script.write_text(MAIN_GUARD.format(environment=environment, call=call))
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=ENVIRONMENT, text=True, capture_output=True, check=True, timeout=100)
    assert done.stdout == "ended with 1\n"
    assert "script.py" in done.stderr
    assert 'Put the calls of agentrl below `if __name__ == "__main__":`' in done.stderr


UNGUARDED = """
import agentrl
from {module} import SMALL, Echo as Given

class Echo(Given):
    pass

run = agentrl.train(Echo, runtime={runtime!r}, run_dir="run", **SMALL, **{more})
print("played as", __name__, len(list(run.episodes())))
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("runtime", "more"), [("local", {}), ("local", {"tensor_parallel_size": 2}), ("ray", {})])
def test_a_script_without_a_main_guard_trains(tmp_path: Path, runtime: str, more: dict[str, object]) -> None:
    """The workers of a tensor-parallel engine are spawned by multiprocessing."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(module="tests.e2e.api_script", runtime=runtime, more=more))
    process = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert "played as __main__ 8" in succeeded(process, 280)


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 7
    words = ("-c", "\n".join(blocks) + "\nprint('done')")
    process = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = succeeded(process, 180)
    assert "max_stalenes = 1: is not a setting. Did you mean `max_staleness`?" in output
