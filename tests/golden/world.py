"""Folder in which recorded commands run: environments, examples, models, data sets and files that pages of the documentation name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "docs" / "models"
HUB = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "Qwen/Qwen3-0.6B": "qwen2.5-0.5b",
    "Qwen/Qwen3-8B": "qwen2.5-7b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "org/model": "qwen2.5-1.5b",
}
"""Names of the hub that are in its cache, with the file of ``docs/models`` that gives their sizes."""
TINY_FOLDERS = ("MODEL", "OTHER", "models/smollm2", "runs/sft/model", "runs/rl/model", "runs/rl-http/model", "runs/dpo/model")
TRAINED = ("runs/second/model", "runs/warm/model", "runs/teacher/model", "runs/desk-chats/model", "runs/swe-chats/model")
"""Folders of models that pages of the documentation name, each with the sizes of a tiny model."""
SHOWN_FILES = (
    *("my_env", "env", "agent", "arithmetic", "broken", "second_try", "guess", "sums", "digit", "dice", "exact", "primes", "balanced"),
    *("near", "parts", "larger", "length", "look", "rewards"),
)
"""Files with environments that pages of the documentation show or leave to the reader."""
SHOWN_DATA = ("questions", "prompts", "example", "easy", "hard", "tasks", "sums", "data/train", "data/test", "splits/train", "splits/test")
"""Data sets that pages of the documentation name."""
COPIED = {
    "chats.jsonl": "examples/tune/chats.jsonl",
    "demonstrations.jsonl": "examples/tune/chats.jsonl",
    "pairs.jsonl": "examples/tune/pairs.jsonl",
    "pairs/data.jsonl": "examples/tune/pairs.jsonl",
    "held-out-pairs/data.jsonl": "examples/tune/pairs.jsonl",
}
"""Files with rows that pages of the documentation name, and those of the repository that stand for them."""
FOLLOWERS = '''"""Callbacks and a sink."""

from agentrl import Callback


class StopWhenSolved(Callback):
    def on_step_end(self, event):
        return {}


class Another(Callback):
    def on_run_end(self, event):
        pass


class Lines(Callback):
    def on_metrics(self, event):
        pass
'''
ENVIRONMENT = '''"""An environment of questions with sums, and a reward for the same answers."""

from agentrl import AgentInstance, StepResult, StepState, Task


class Sums(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task(f"{number} + 1 = ", label=str(number + 1), id=str(number)) for number in range(40)]

    def step(self, state: StepState) -> StepResult:
        return StepResult(float(state.action_text == state.label), terminated=True)

    def snapshot(self):
        return None

    def restore(self, state):
        pass


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
'''
TINY = ROOT / "agentrl" / "assets" / "tiny-chat"
"""The model that ships with agentrl, whose tokenizer and sizes small models here have."""
JUDGES = ("runs/rm/model", "helpful", "safe")
"""Folders of reward models, with a head that makes one score."""


def build_world(root: Path) -> Path:
    """Make the folder, and beside it a home and a cache of the hub; return it."""
    work = root / "work"
    for name in ("envs", "examples", "docs/models"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    _copy_tiny(work)
    for path in sorted(MODELS.glob("*.json")):
        _write_model(work / "models" / path.stem, json.loads(path.read_text(encoding="utf-8")))
    for name, model in HUB.items():
        _write_cached(root / "hub", name, (MODELS / f"{model}.json").read_text(encoding="utf-8"))
    for name in SHOWN_FILES:
        (work / f"{name}.py").write_text(ENVIRONMENT, encoding="utf-8")
    for name in SHOWN_DATA:
        _write_rows(work / f"{name}.jsonl")
    for name, source in COPIED.items():
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / source, work / name)
    for name in ("my_callbacks", "my_sinks"):
        (work / f"{name}.py").write_text(FOLLOWERS, encoding="utf-8")
    (root / "home").mkdir()
    return work


def clear_runs(work: Path) -> None:
    """Remove what commands have written, but for the folders of models."""
    for path in [path for path in (work / "data").iterdir() if path.is_dir()]:
        shutil.rmtree(path)
    for path in (work / "runs").glob("*"):
        if not (path / "model").is_dir() or (path / "metrics.jsonl").exists() or (path / "config.json").exists():
            shutil.rmtree(path)
    _copy_tiny(work)


def _copy_tiny(work: Path) -> None:
    """Write the small models that are not there."""
    for name in (*TINY_FOLDERS, *TRAINED, *JUDGES):
        if (work / name).exists():
            continue
        shutil.copytree(TINY, work / name, ignore=shutil.ignore_patterns("*.safetensors"))
        (work / name / "model.safetensors").touch()
        if name in JUDGES:
            header = json.dumps({"score.weight": {"dtype": "F32", "shape": [1, 64], "data_offsets": [0, 256]}}).encode()
            (work / name / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))


def _write_model(folder: Path, config: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in ("pytorch_model.bin", "tokenizer.model"):  # which are never read
        (folder / name).touch()


def _write_cached(hub: Path, name: str, config: str) -> None:
    """Write a model's configuration as the cache of the hub holds it."""
    folder, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit, encoding="ascii")
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config, encoding="utf-8")


def _write_rows(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"{number} + 1 = ", "question": f"{number} + 1 = ", "label": str(number + 1), "answer": str(number + 1)}
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
