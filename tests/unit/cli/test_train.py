"""``--dry-run`` and the immediate answers of ``agentrl train``."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

from agentrl.assets import tiny_model_path
from agentrl.cli.main import main as command
from agentrl.cli.train import main
from agentrl.config.load import load
from agentrl.config.mapping import from_mapping, to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import TRAIN
from agentrl.resolve.parts import check_model

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
    shutil.copytree(tiny_model_path(), tmp_path / "model")
    check(str(tmp_path / "model"))
    for pattern, part in (("model.safetensors", "weights"), ("*token*", "tokenizer")):
        shutil.copytree(tiny_model_path(), tmp_path / part, ignore=shutil.ignore_patterns(pattern))
        with pytest.raises(ConfigError, match=rf"--model = .*: is a directory without {part}: no file is named like"):
            check(str(tmp_path / part))
    asked: list[float] = []

    def model_info(self: object, model: str, *, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("unreachable")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ConfigError, match=r"--model = 'nobody/none': .* cannot be asked: unreachable\. Download it"):
        check("nobody/none")
    assert asked == [5]


def test_words_that_are_nearly_right_are_answered(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for word, meant in (("trian", "train"), ("chekc", "check")):
        assert command([word]) == 2
        assert f"Did you mean `agentrl {meant}`?" in capsys.readouterr().err
    assert command(["train", "x.py", "--dataset", "a", "--epochs", "3", "--batch-size", "4", "--lr", "1"]) == 2
    told = capsys.readouterr().err
    for word, meant in (("dataset", "prompts"), ("epochs", "num-steps"), ("batch-size", "groups-per-step"), ("lr", "learning-rate")):
        assert re.search(rf"--{word} +did you mean --{meant}\?", told), told
    for name in ("replay", "export"):
        assert command([name, str(tmp_path / "nope")]) == 2
        assert re.fullmatch(r"agentrl: RUN = '.*nope': there is no such directory. Name a run's directory.*\n", capsys.readouterr().err)


def test_a_learning_rate_of_zero_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--learning-rate = '?0.*'?: must be greater than 0"):
        main([*words, "--learning-rate", "0"])


def test_answers_that_fill_the_context_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--max-new-tokens = 100000: leaves no room for a prompt in a context of \d+ tokens"):
        main([*words, "--max-new-tokens", "100000"])


def test_a_dry_run_refuses_what_the_run_would(words: list[str], tmp_path: Path) -> None:
    main(words)
    run = tmp_path / "old"
    run.mkdir()
    config = changed(load(TRAIN, [word for word in words if word != "--dry-run"]), run_dir=run)
    (run / "config.json").write_text(to_json(config))
    with pytest.raises(ConfigError, match=f"--resume = '{run}': holds no complete checkpoint"):
        main(["--resume", str(run), "--dry-run"])


def test_an_interrupt_while_a_command_is_imported_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert command(["train", "x.py"]) == 130
    assert capsys.readouterr().err == "\nagentrl: interrupted\n"
