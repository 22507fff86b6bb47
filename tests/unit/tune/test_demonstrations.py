"""``--sft-data``: rows as ``agentrl sft`` has them, in an order that follows from the seed, and what is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.tune import SftConfig
from agentrl.core.errors import ConfigError
from agentrl.learner.demonstration_files import Demonstrations
from agentrl.learner.demonstrations import as_rows
from agentrl.resolve.commands import load_config
from agentrl.resolve.demonstrations import demonstrations
from agentrl.tune.data import drawing_order
from agentrl.tune.learner_rows import RowMaker
from agentrl.tune.prepare import encode_demonstrations, write_encoded

EXAMPLES = Path(__file__).parents[3] / "examples" / "tune"
CHATS, TEXTS = EXAMPLES / "chats.jsonl", EXAMPLES / "texts.jsonl"


def settings(data: str, *words: str) -> SftConfig:
    found = demonstrations(load_config(["--agent", "module:Name", "--sft-data", data, *words]))
    assert found is not None
    return found


@pytest.mark.parametrize("options", ["", "&train_on=last", "&train_on=all&shuffle=false", "&system_prompt=Be+short."])
def test_rows_are_those_of_sft_in_the_order_of_the_seed(tmp_path: Path, options: str) -> None:
    sft = settings(f"{CHATS}#batch_size=7{options}", "--seed", "5")
    encoded = encode_demonstrations(sft)
    write_encoded(encoded, sft, 60, tmp_path / "rows")  # more than an epoch
    (part,), table = encoded.parts, Demonstrations(tmp_path / "rows")
    order = drawing_order([len(part)], 420, sft.data, 5)
    assert len(part) == 320
    for step in (59, 0, 33):
        found, expected = as_rows(table.of_step(step)), RowMaker("sft")([part[number] for number in order[7 * step :][:7]])
        assert [row.tokens.tolist() for row in found.rows] == [row.tokens.tolist() for row in expected.rows]
        assert [row.reads.tolist() for row in found.rows] == [row.reads.tolist() for row in expected.rows]
        assert found.row.tolist() == expected.row.tolist()
        assert found.row_lengths.tolist() == expected.row_lengths.tolist()
    other = settings(f"{CHATS}#batch_size=7{options}", "--seed", "6")
    write_encoded(encode_demonstrations(other), other, 1, tmp_path / "other")
    same = Demonstrations(tmp_path / "other").of_step(0)[0][0].tolist() == table.of_step(0)[0][0].tolist()
    assert same == ("shuffle=false" in options)


def test_several_sources_have_proportions() -> None:
    sft = settings(f"{CHATS},{TEXTS}#data_probs=0.5,0.5")
    encoded = encode_demonstrations(sft)
    assert len(encoded.parts) == 2
    assert encoded.fingerprint != encode_demonstrations(settings(str(CHATS))).fingerprint


def test_the_template_and_the_model_are_those_of_the_run() -> None:
    sft = settings(str(CHATS), "--thinking", "off", "--max-images", "3")
    assert (sft.model.thinking, sft.images.max_images, sft.optim.batch_size) == ("off", 3, 32)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sft-data", "no.jsonl"), r"--sft-data = 'no.jsonl': no such file"),
        (("--sft-data", f"{CHATS}#max_lengh=4"), r"max_lengh = '4': is not a setting. Did you mean `max_length`"),
        (("--sft-data", f"{CHATS}#max_length=4"), r"--sft-data: max_length = '4': must be greater"),
        (("--sft-data", f"{CHATS}#learning_rate=1"), r"learning_rate=1'?: is no setting of the rows"),
        (("--sft-data", f"{CHATS}#loss=dft"), r"loss=dft'?: is no setting of the rows"),
        (("--sft-data", f"{CHATS}#data_probs=1,1"), r"--sft-data: data_probs = '1,1': has 2 numbers for 1 data set"),
        (("--sft-data", f"{CHATS}#batch_size=2", "--mini-batches", "4"), r"batch_size = 2: are too few for the 4 updates"),
        (("--sft-coef", "0.5"), r"--sft-coef = 0.5: has no effect without --sft-data"),
    ],
)
def test_what_cannot_be_imitated_is_refused_at_once(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(["--agent", "module:Name", *words])


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_beyond_the_context_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", {"text": "one two " * 30})
    with pytest.raises(ConfigError, match=r"has a row of \d+ tokens, and the context of the model 40. Add max_length=40"):
        encode_demonstrations(settings(data), 40)
    encode_demonstrations(settings(f"{data}#max_length=40&overlong=cut"), 40)


def test_the_path_is_that_of_the_folder_where_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows.jsonl", {"text": "one"})
    monkeypatch.chdir(tmp_path)
    config = load_config(["--agent", "module:Name", "--sft-data", "rows.jsonl#batch_size=3"])
    assert config.algo.sft_data == f"{tmp_path}/rows.jsonl#batch_size=3"


def test_rows_with_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SimpleNamespace(parts=[({"input_ids": [1, 2], "labels": [1, 2], "images": [0]},)], counts={"train": {"longest": 2}})
    monkeypatch.setattr("agentrl.tune.prepare.prepare", lambda *given: rows)
    with pytest.raises(ConfigError, match="has rows with images"):
        encode_demonstrations(settings(str(CHATS)), 8)
