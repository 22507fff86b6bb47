"""``--dry-run`` and the immediate answers of ``agentrl train``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.cli.train import main
from agentrl.config.mapping import from_mapping
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.rollout.tasks import check_model

REWARD = "def reward(completion, label):\n    return float(completion == label)\n"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "judge.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(8)))
    folders = ["--prompts", str(tmp_path / "data.jsonl"), "--run-dir", str(tmp_path / "run")]
    return ["--agent", str(tmp_path / "judge.py"), *folders, "--groups-per-step", "4", "--num-steps", "3", "--dry-run"]


def test_a_dry_run_says_what_the_run_would_be(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--no-shuffle"]) == 0
    out, said = capsys.readouterr()
    assert json.loads(out)["flow"]["groups_per_step"] == 4
    assert "--num-steps 3" in said
    assert "--no-shuffle" in said
    assert "--max-staleness" not in said
    assert "32 episodes per step (4 groups of 8), 96 in 3 steps" in said
    assert "8 tasks, 1.5 epochs in 3 steps" in said
    assert "Write --label-key answer." in said
    assert not (tmp_path / "run").exists()


def test_a_dry_run_looks_at_the_data(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'question'"):
        main([*words, "--input-key", "question"])
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(ConfigError, match="--prompts"):
        main(words)


def test_a_model_that_cannot_be_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(model: str) -> None:
        check_model(from_mapping(TrainConfig, {"agent": "x.py", "model": model}))

    check("")
    check(str(tiny_model_path()))
    for model, problem in ((str(tmp_path), "holds no config.json"), (__file__, "is a file"), ("./none", "there is no such directory")):
        with pytest.raises(ConfigError, match=f"--model = .*: {problem}"):
            check(model)
    asked: list[float] = []

    def model_info(self: object, model: str, *, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("unreachable")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ConfigError, match=r"--model = 'nobody/none': .* cannot be asked: unreachable\. Download it"):
        check("nobody/none")
    assert asked == [5]
