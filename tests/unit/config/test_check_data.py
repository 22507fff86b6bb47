"""Settings of data sets that contradict each other."""

from pathlib import Path

import pytest

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config


def load(folder: Path, *flags: str) -> TrainConfig:
    (folder / "env.py").touch()
    for name in ("a.jsonl", "b.parquet"):
        (folder / name).touch()
    return load_config(["--agent", str(folder / "env.py"), *(flag.replace("DIR", str(folder)) for flag in flags)])


def test_lists_are_split_at_commas(tmp_path: Path) -> None:
    data = load(tmp_path, "--prompts", "DIR/a.jsonl, DIR/b.parquet", "--prompt-probs", "2,1").data
    assert data.prompt_sources == (f"{tmp_path}/a.jsonl", f"{tmp_path}/b.parquet")
    assert data.prompt_weights == (2.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "field", "expected"),
    [
        (["--prompts", "DIR/a.jsonl,DIR/nothing.jsonl"], "--prompts", "no such file"),
        (["--prompts", "DIR/a.jsonl", "--prompt-probs", "0.5,0.5"], "--prompt-probs", "has 2 numbers for 1 data set"),
        (["--prompt-probs", "1"], "--prompt-probs", "has 1 number for 0 data sets"),
        (["--prompts", "DIR/a.jsonl,DIR/b.parquet", "--prompt-probs", "1,x"], "--prompt-probs", "is not a list of numbers"),
        (["--prompts", "DIR/a.jsonl,DIR/b.parquet", "--prompt-probs", "1,0"], "--prompt-probs", "numbers above 0"),
        (["--prompts", "DIR/a.jsonl,DIR/b.parquet", "--prompt-probs", "1,nan"], "--prompt-probs", "numbers above 0"),
        (["--input-template", "{}"], "--input-template", "has no effect"),
        (["--prompts", "DIR/a.jsonl", "--input-template", "Q:"], "--input-template", "exactly once"),
        (["--prompts", "DIR/a.jsonl", "--input-template", r"{} in \boxed{}"], "--input-template", "exactly once"),
        (["--prompts", "DIR/a.jsonl", "--input-template", "{question}"], "--input-template", "exactly once"),
        (["--prompts", "DIR/a.jsonl", "--input-template", "{"], "--input-template", "exactly once"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, flags: list[str], field: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        load(tmp_path, *flags)
    assert caught.value.field == field
