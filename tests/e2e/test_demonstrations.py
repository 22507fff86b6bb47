"""Runs that imitate demonstrations beside their episodes: resumed bit for bit, asynchronous, on several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, Run, succeeded, train
from tests.e2e.test_train import untimed

pytestmark = pytest.mark.timeout(900)

LOCAL = ("--runtime", "local", *SMALL)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums as chats, whose answers are trained."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write(path, 0)
    return path


def write(path: Path, more: int) -> None:
    sums = [(first, second) for first in range(5) for second in range(4)]
    rows = [[("user", f"What is {a}+{b}?"), ("assistant", str(a + b + more))] for a, b in sums]
    chats = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def weights(run: Run) -> bytes:
    return (run.directory / "model" / "model.safetensors").read_bytes()


def test_a_run_goes_on_with_the_demonstrations_of_its_steps(tmp_path: Path, chats: Path) -> None:
    own = tmp_path / "chats.jsonl"
    shutil.copyfile(chats, own)
    words = (*LOCAL, "--sft-data", f"{own}#batch_size=6", "--sft-coef", "0.5")
    once = succeeded(train(tmp_path / "once", *words, "--num-steps", "4"))
    losses = [row["sft/loss"] for row in once.metrics]
    assert len({*losses}) == 4
    assert losses[-1] < losses[0]
    assert all(row["loss/sft"] == pytest.approx(0.5 * row["sft/loss"], rel=1e-5) for row in once.metrics)

    first = succeeded(train(tmp_path / "parts", *words, "--save-every", "1", "--num-steps", "2"))
    goes_on = ("--runtime", "local", "--resume", str(first.directory))
    again = succeeded(train(first.directory, *goes_on, "--num-steps", "4"))
    assert weights(again) == weights(once)
    # The first part asked for no groups behind its end.
    ahead = {"ledger/submitted", "ledger/in_flight"}
    rows, expected = ([{name: row[name] for name in row.keys() - ahead} for row in untimed(part)] for part in (again, once))
    assert rows == expected

    write(own, 1)
    refused = train(first.directory, *goes_on, "--num-steps", "5")
    assert refused.code == 2
    assert "reads other files than the run began with: --sft-data (rows)" in refused.output
    assert succeeded(train(first.directory, *goes_on, "--num-steps", "5", "--accept-changed-inputs")).summary["steps"] == 5


def test_a_row_that_is_wrong_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello."}]}\n')
    run = train(tmp_path / "run", *LOCAL, "--num-steps", "1", "--sft-data", str(tmp_path / "chats.jsonl"))
    assert run.code == 2
    assert "--sft-data" in run.output
    assert "line 1: column 'messages' ends with a message of user, which nothing answers" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--async",), ("--num-learners", "2"), ("--num-learners", "2", "--zero-stage", "3", "--async")])
def test_other_layouts_imitate_the_same_rows(tmp_path: Path, chats: Path, words: tuple[str, ...]) -> None:
    data = ("--sft-data", f"{chats}#batch_size=6", "--num-steps", "2", "--learning-rate", "0")
    plain = succeeded(train(tmp_path / "plain", *LOCAL, *data))
    other = succeeded(train(tmp_path / "other", *SMALL, *data, *words))
    for before, now in zip(plain.metrics, other.metrics, strict=True):
        assert now["sft/loss"] == pytest.approx(before["sft/loss"], abs=1e-4)
        assert now["sft/tokens"] == before["sft/tokens"]
