"""Rows as arrays, their cache, and the tokens of many texts at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.assets import tiny_model_path
from agentrl.config.methods import METHODS
from agentrl.config.tune import SftConfig
from agentrl.core.tokenizers import load_tokenizer
from agentrl.resolve.tune import load_given
from agentrl.rollout import text_codec
from agentrl.rollout.text_codec import TextCodec
from agentrl.tune import encode, prepare
from agentrl.tune.encode import Encoder
from agentrl.tune.forms import Chat
from agentrl.tune.row_table import Drawn, Prepared, RowTable, as_rows, fingerprint
from agentrl.tune.row_text import RowOfTurns, as_array
from tests.unit.tune.plans import encoder_of, rows_of

DATA = Path(__file__).parents[3] / "examples" / "tune"
OF = {"sft": "chats", "dpo": "pairs", "kto": "labelled", "process-reward-model": "steps", "reward-model": "helpful"}
NUMBERS: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 3], "labels": [-100, 1.0, 0.5], "label": True, "margin": 0.25},
    {"input_ids": [4], "labels": [0.0], "label": False, "margin": 2.0},
]


def test_a_table_gives_its_rows_back_also_from_files(tmp_path: Path) -> None:
    table = as_rows(NUMBERS)
    assert isinstance(table, RowTable)
    table.write(tmp_path / "table")
    for each in (table, RowTable.read(tmp_path / "table")):
        assert list(each) == each[:2] == NUMBERS
        assert each[-1] == NUMBERS[1]
        assert type(each[0]["label"]) is bool
        assert {type(token) for token in each[0]["input_ids"]} == {int}
        with pytest.raises(IndexError):
            each[2]
    assert fingerprint(table) == fingerprint(NUMBERS) != fingerprint(NUMBERS[::-1])
    assert fingerprint(table) == "6c15f0a42b9788e471b2eb2675595268997af1dd452bcd39a2431c7c3165eeb6"  # runs that were begun with 0.2 go on
    assert fingerprint(table[:1], table[1:]) == fingerprint(table)
    assert as_rows([{"input_ids": as_array([1, 2]), "images": ["a.png"]}]) == ({"input_ids": [1, 2], "images": ["a.png"]},)
    assert not as_rows([])


def test_numbers_of_a_column_are_whole_unless_a_later_row_has_fractions() -> None:
    assert list(as_rows([{"labels": [1, 2]}, {"labels": [0.1]}])) == [{"labels": [1, 2]}, {"labels": [0.1]}]
    assert list(as_rows([{"prompt_ids": []}, {"prompt_ids": []}])) == [{"prompt_ids": []}] * 2


def test_rows_are_drawn_from_parts_that_follow_each_other() -> None:
    parts = [as_rows([{"label": number} for number in numbers]) for numbers in ((0, 1, 2), (3, 4))]
    drawn = Drawn(parts, [4, 0, 3, 0])
    assert [row["label"] for row in drawn] == [4, 0, 3, 0]
    assert [row["label"] for row in Drawn(parts[:1], [2, 1])[:2]] == [2, 1]


def prepared(command: str = "sft", **settings: Any) -> Prepared:
    return rows_of(load_given(METHODS[command], {"data": str(DATA / f"{OF[command]}.jsonl"), "eval_size": 8, **settings}))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each set of examples that was tokenised."""
    found: list[str] = []
    before = Encoder.encode

    def noted(self: Encoder, *given: Any) -> Any:
        found.append("x")
        return before(self, *given)

    monkeypatch.setattr(prepare, "MIN_EXAMPLES", 100)
    monkeypatch.setattr(Encoder, "encode", noted)
    return found


@pytest.mark.parametrize("command", OF)
def test_a_second_start_reads_the_rows_of_the_first(command: str, encoded: list[str], tmp_path: Path) -> None:
    given: dict[str, Any] = {"margin_key": "margin"} if command == "reward-model" else {}
    first = prepared(command, token_cache=str(tmp_path), **given)
    assert len(encoded) == 2
    again = prepared(command, token_cache=str(tmp_path), learning_rate=1e-4, **given)
    assert len(encoded) == 2
    plain = prepared(command, token_cache="none", **given)
    assert len(encoded) == 4
    for other in (again, plain):
        assert [list(part) for part in other.parts] == [list(part) for part in first.parts]
        assert list(other.held_out) == list(first.held_out)
        assert (other.counts, other.samples, other.ends, other.fingerprint) == (first.counts, first.samples, first.ends, first.fingerprint)


def test_rows_are_made_anew_for_other_settings_templates_and_contents(encoded: list[str], tmp_path: Path) -> None:
    own = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|> ' }}{% endfor %}"
    template = tmp_path / "own.jinja"
    template.write_text(own + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
    rows = (DATA / "chats.jsonl").read_text().splitlines()
    data, copy = tmp_path / "rows.jsonl", tmp_path / "copy.jsonl"
    data.write_text("\n".join([rows[1], *rows[1:]]))
    copy.write_text("\n".join(rows))
    changes: list[dict[str, Any]] = [
        *({}, {"max_length": 64}, {"train_on": "last"}, {"system_prompt": "Be brief."}),
        *({"chat_template": str(template)}, {"eos_token": "<|tool|>"}, {"data": str(data)}, {"seed": 3}),
    ]
    for number, change in enumerate(changes, start=1):
        prepared(token_cache=str(tmp_path / "cache"), **change)
        assert len(encoded) == 2 * number, change
    prepared(token_cache=str(tmp_path / "cache"), data=str(copy))
    assert len(encoded) == 2 * len(changes)


def test_broken_rows_are_made_anew_and_old_ones_go(encoded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(token_cache=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    with next(folder.rglob("labels.npy")).open("ab") as file:
        file.write(b"more")
    for _ in range(2):
        prepared(token_cache=str(tmp_path))
        assert len(encoded) == 4
    monkeypatch.setattr(prepare, "KEPT", 2)
    os.utime(folder, (1, 1))
    for length in (64, 65):
        prepared(token_cache=str(tmp_path), max_length=length)
    assert len(list(tmp_path.iterdir())) == 2
    assert not folder.exists()


def test_a_disk_that_cannot_be_written_to_stops_nothing(encoded: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert prepared(token_cache=str(tmp_path / "file" / "below")).parts
    assert len(encoded) == 2


def test_few_rows_are_not_kept_and_the_default_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prepared()
    assert not list(tmp_path.iterdir())
    assert prepare.folder_of("") == tmp_path / "agentrl" / "rows"


def test_tokens_do_not_depend_on_the_examples_that_are_encoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(load_tokenizer(str(tiny_model_path())))
    chats = [Chat(tuple(json.loads(line)["messages"])) for line in (DATA / "chats.jsonl").read_text().splitlines()[:40]]
    spelled: Any = ({"role": "user", "content": "What is <|end|>?"}, {"role": "assistant", "content": "A <|end|> token.\n"})
    chats.insert(7, Chat(spelled))
    alone = [row for chat in chats for row in encoder_of(codec, SftConfig()).encode([chat])]
    assert alone[7]["input_ids"].count(codec.tokenizer.eos_token_id) == 2
    for size in (1, 3, 512):
        monkeypatch.setattr(encode, "CHUNK", size)
        assert encoder_of(codec, SftConfig()).encode(chats) == alone


def test_each_few_examples_are_one_call_of_the_tokenizer_whatever_they_repeat_or_spell(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(load_tokenizer(str(tiny_model_path())))
    long, asked = "a long question that many chats begin with. " * 9, list[int]()
    chats = [Chat(({"role": "user", "content": f"{long}"}, {"role": "assistant", "content": f"{n} <|end|> {n}"})) for n in range(6)]
    encode_pieces = codec.encode_pieces
    monkeypatch.setattr(codec, "encode_pieces", lambda pieces: (asked.append(len(pieces)), encode_pieces(pieces))[1])
    monkeypatch.setattr(encode, "CHUNK", 2)
    rows = encoder_of(codec, SftConfig()).encode(chats)
    assert len(asked) == 3
    monkeypatch.undo()
    assert rows == encoder_of(codec, SftConfig()).encode(chats)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_tokens_of_pieces_do_not_depend_on_the_calls_they_are_made_in(
    cores: int, joined: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_codec, "usable_cores", lambda: cores)
    monkeypatch.setattr(text_codec, "TOGETHER", 6)
    monkeypatch.setattr(text_codec, "JOINED", joined)
    codec = TextCodec(load_tokenizer(str(tiny_model_path())))
    begun = []
    for n in range(count):
        begun += [f"before {n}", f"<|end|>\n{'word ' * n}", f"<|end|> \ud800 {n}", "<|user|>", "<|end|>"]
    for pieces in (begun, begun[1:], [f"{'word ' * n}<|end|> \ud800 {n}" for n in range(count)]):
        assert [each.tolist() for each in codec.encode_pieces(pieces)] == [codec.encode_text(piece) for piece in pieces]


def test_pieces_are_encoded_as_one_text_only_where_their_tokens_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(load_tokenizer(str(tiny_model_path())))
    pieces = ["<|end|>one", "<|end|>two", "<|user|>three"]
    assert codec._joined(["none", *pieces]) == [["none"], pieces]
    assert codec._joined(pieces * 3) == [(pieces * 3)[:8], pieces[2:]]
    alone = [codec.encode_text(piece) for piece in pieces]
    monkeypatch.setattr(codec, "_control_ids", codec._control_ids | {alone[0][1]})  # as if letters could become a control token
    assert [each.tolist() for each in codec.encode_pieces(pieces)] == alone
    codec = TextCodec(load_tokenizer(str(tiny_model_path())))
    monkeypatch.setattr(codec, "_ids", lambda text: [1] if "user" in text and "three" in text else [1, 2])  # tokens that reach further
    assert codec._joined(pieces) == [[piece] for piece in pieces]


@pytest.mark.parametrize(("joint", "ids"), [([1, 2, 3], [1, 2, 3]), ([9, 3], [1, 5, 3]), ([], [1, 5, 3])])
def test_text_that_changes_the_tokens_before_it_is_encoded_alone(joint: list[int], ids: list[int]) -> None:
    tokens = {"": [], "a": [1], "ab": joint, "b": [5, 3]}
    batch: Any = SimpleNamespace(want=lambda text: None, ids=lambda text: as_array(tokens[text]))
    renderer: Any = SimpleNamespace(last_control=lambda text: -1)
    row = RowOfTurns(TextCodec(load_tokenizer(str(tiny_model_path()))), renderer, batch, [""])
    row.add("a", trained=False)
    row.add("b", trained=True)
    row.finish()
    assert row.ids.tolist() == ids
    assert row.labels(None, everything=False).tolist() == [-100, *ids[1:]]
    assert row.ends == [3]
