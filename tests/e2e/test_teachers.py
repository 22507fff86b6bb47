"""Teachers that are served beside a run teach as one on the learner does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from agentrl.assets import tiny_model_path
from tests.benchmarks.estimators import perturb
from tests.e2e.runs import succeeded, train
from tests.learner_support import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
START_S = 300.0
SIZES = ("--num-steps", "16", "--groups-per-step", "8", "--n-samples-per-prompt", "4", "--max-new-tokens", "8", "--learning-rate", "5e-4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's own server with the bundled model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--served-model-name", "big")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_path()), *options]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen([*command, *address], env=os.environ | own, stdout=file, stderr=file, cwd=log.parent)
    try:
        _wait_until_it_answers(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1#model=big"
    finally:
        process.terminate()
        process.wait(60.0)


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5.0):
                return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(1.0)
    raise AssertionError(f"the server did not start within {START_S:g} s: {log.read_text()[-3000:]}")


def divergences(run_dir: Path, student: str, *flags: str) -> list[float]:
    """The divergence from the teacher by step."""
    common = ("--model", student, "--advantage-estimator", "distillation", "--seed", "1", "--runtime", "local")
    run = succeeded(train(run_dir, *SIZES, *common, *flags, timeout_s=400))
    return [row["distill/kl"] for row in run.metrics]


def test_the_divergence_falls_behind_vllm_as_on_the_learner(tmp_path: Path, server: str) -> None:
    student = perturb(tmp_path / "student")
    local = divergences(tmp_path / "local", student, "--teacher", str(tiny_model_path()))
    served = divergences(tmp_path / "served", student, "--teacher", server)
    beside = divergences(tmp_path / "beside", student, "--teacher", f"engine:{tiny_model_path()}")
    assert fmean(local[-4:]) < 0.8 * fmean(local[:4]), local
    for found in (served, beside):
        assert fmean(found[:4]) == pytest.approx(fmean(local[:4]), rel=0.05)
        assert fmean(found[-4:]) == pytest.approx(fmean(local[-4:]), rel=0.05)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_divergence_over_likely_tokens_falls(tmp_path: Path, server: str, direction: str) -> None:
    student = perturb(tmp_path / "student")
    flags = ("--teacher", server, "--teacher-loss", direction, "--teacher-top-k", "16", "--async")
    found = divergences(tmp_path / "run", student, *flags)
    assert fmean(found[-4:]) < 0.7 * fmean(found[:4]), found


START_LEARNER = """
import sys
from agentrl.core.process import resident_mib
from agentrl.learner.learner import LearnerRank
from tests.learner_support import CollectingSender, make_settings
algo = {"advantage_estimator": "distillation", "teacher": sys.argv[2]} if sys.argv[2] else {}
learner = LearnerRank(make_settings(sys.argv[1], algo=algo), CollectingSender())
learner.start(0, 1, 0)
print(resident_mib())
learner.close()
"""


def test_memory_of_the_learner_does_not_grow_with_a_served_teacher(tmp_path: Path) -> None:
    student = write_model(tmp_path / "student")
    teacher = write_model(tmp_path / "teacher", hidden_size=1536, intermediate_size=4096, num_hidden_layers=4)
    size_mib = (tmp_path / "teacher" / "model.safetensors").stat().st_size / 2**20

    def resident(spec: str) -> float:
        found = subprocess.run([sys.executable, "-c", START_LEARNER, student, spec], capture_output=True, text=True, check=True, cwd=ROOT)
        return float(found.stdout.split()[-1])

    without, served, local = resident(""), resident(f"engine:{teacher}"), resident(teacher)
    assert size_mib > 300
    assert abs(served - without) < 0.2 * size_mib
    assert local - without > 0.8 * size_mib


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    student = perturb(tmp_path / "student")
    rows = []
    for ranks in ("1", "2"):
        flags = ("--teacher", f"engine:{tiny_model_path()}", "--teacher-loss", "forward", "--num-learners", ranks, "--num-steps", "3")
        common = ("--model", student, "--advantage-estimator", "distillation", "--seed", "1", "--runtime", "ray")
        run = succeeded(train(tmp_path / ranks, *SIZES, *common, *flags, timeout_s=400))
        rows.append([(row["distill/kl"], row["grad_norm"], row["loss/teacher"]) for row in run.metrics])
    for one, two in zip(*rows, strict=True):
        assert two == pytest.approx(one, rel=1e-3)
