"""Prompts from files and folders, several data sets, and data that cannot be used."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agentrl import Task
from agentrl.core.errors import DataError
from agentrl.env.agent import StepState
from agentrl.env.data_files import read_rows
from agentrl.env.prompts import PromptFormat, read_prompts
from agentrl.env.rewards.forms import form_of


def read(source: str | Path, **options: Any) -> list[Task]:
    (part,) = read_prompts([str(source)], PromptFormat(**options))
    return part.tasks


def jsonl(folder: Path, text: str) -> str:
    path = folder / "data.jsonl"
    path.write_text(text)
    return str(path)


def test_jsonl_with_labels_chat_and_other_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b"}]
    path = jsonl(tmp_path, json.dumps({"q": "a", "a": 1, "level": "easy"}) + "\n\n" + json.dumps({"q": chat}) + "\n")
    one, two = read(path, input_key="q", label_key="a")
    assert (one.prompt, one.label, one.metadata) == ("a", 1, {"a": 1, "level": "easy"})
    assert (two.prompt, two.label) == (chat, None)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "--prompts", "line 2 is not JSON"),
        ("[1]\n", "--prompts", "row 0 is of the type int"),
        ('{"promt": "a"}\n', "--input-key", "Did you mean --input-key promt"),
        ('{"text1": "a", "x": 1}\n', "--input-key", "Its columns are text1, x"),
        ('{"prompt": "a"}\n{"prompt": 5}\n', "--prompts", "line 2: column 'prompt'"),
        ('{"prompt": []}\n', "--prompts", "line 1: column 'prompt'"),
        ("\n", "--prompts", "holds no row"),
    ],
)
def test_malformed_jsonl_names_the_line_or_the_key(tmp_path: Path, text: str, field: str, expected: str) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        read(jsonl(tmp_path, text))
    assert caught.value.field == field


def test_a_missing_file_suggests_the_nearest(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "a"}\n')
    with pytest.raises(DataError, match=r"Did you mean .*data\.jsonl"):
        read(path.replace("data", "dat"))
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nothing")


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="not a readable Parquet"):
        read(tmp_path / "bad.parquet")


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "b"}]
    pq.write_table(pa.table({"prompt": [chat], "label": ["x"]}), tmp_path / "data.parquet")
    (task,) = read(tmp_path / "data.parquet")
    assert (task.prompt, task.label) == (chat, "x")


def test_a_saved_hugging_face_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"prompt": ["a", "b"], "label": [1, 2]})
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    for name in ("plain", "splits"):
        assert [(task.prompt, task.label) for task in read(tmp_path / name)] == [("a", 1), ("b", 2)]
    with pytest.raises(DataError, match="is no split of"):
        read(tmp_path / "splits", split="test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be loaded"):
        read(tmp_path / "empty")


def write(path: Path, *prompts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_a_folder_of_files(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "a.jsonl", "a1", "a2")
    write(tmp_path / "more" / "c.jsonl", "c1")
    write(tmp_path / ".cache" / "d.jsonl", "hidden")
    pq.write_table(pa.table({"prompt": ["b1"]}), tmp_path / "b.parquet")
    assert [task.prompt for task in read(tmp_path)] == ["a1", "a2", "b1", "c1"]
    (tmp_path / "more" / "c.jsonl").write_text('{"prompt": 5}\n')
    with pytest.raises(DataError, match=r"more/c\.jsonl line 1: column"):
        read(tmp_path)


def test_a_folder_whose_files_say_their_split(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00002.jsonl", "a")
    write(tmp_path / "data" / "train-00001-of-00002.jsonl", "b")
    write(tmp_path / "data" / "test-00000-of-00001.jsonl", "t")
    assert [task.prompt for task in read(tmp_path)] == ["a", "b"]
    assert [task.prompt for task in read(tmp_path, split="test")] == ["t"]
    with pytest.raises(DataError, match=r"--eval-split = 'validation': is no split of .*There is test, train\."):
        read(tmp_path, split="validation", split_flag="--eval-split")


def test_a_folder_in_the_form_of_the_hub_with_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    calls: list[tuple[Any, ...]] = []

    def load(*args: Any, **options: Any) -> list[dict[str, str]]:
        calls.append((*args, options))
        return [{"prompt": "p"}]

    monkeypatch.setattr("datasets.load_dataset", load)
    assert [task.prompt for task in read("some/name@main", split="test")] == ["p"]
    read("some/name")
    assert calls == [("some/name", "main", {"split": "test"}), ("some/name", None, {"split": "train"})]


def test_tasks_of_several_sets_say_where_they_are_from(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", "a0", "a1"), write(tmp_path / "b.jsonl", "b0")
    sets = read_prompts([str(a), str(b)], PromptFormat())
    tasks = [task for part in sets for task in part.tasks]
    assert [(task.id, task.metadata["source"]) for task in tasks] == [("a/0", "a"), ("a/1", "a"), ("b/0", "b")]
    same = write(tmp_path / "other" / "a.jsonl", "x")
    sets = read_prompts([str(a), str(same)], PromptFormat())
    assert [part.name for part in sets] == [str(a), str(same)]


def test_a_template_is_put_around_text_and_not_around_chat(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "c"}]
    path = jsonl(tmp_path, json.dumps({"prompt": "1+1 {x}"}) + "\n" + json.dumps({"prompt": chat}) + "\n")
    tasks = read(path, input_template="Q: {}\nAnswer in \\boxed{{}}.")
    assert [task.prompt for task in tasks] == ["Q: 1+1 {x}\nAnswer in \\boxed{}.", chat]


def test_a_table_with_a_heading_is_read_cell_by_cell(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('\ufeffprompt,label,level\n"What is 1, and\n1?",2,easy\nb,3,hard\n', encoding="utf-8")
    first, second = read(tmp_path / "data.csv")
    assert (first.prompt, first.label, first.metadata) == ("What is 1, and\n1?", "2", {"level": "easy"})
    (tmp_path / "data.tsv").write_text("prompt\tlabel\na, b\t4\n")
    assert [(task.prompt, task.label) for task in read(tmp_path / "data.tsv")] == [("a, b", "4")]
    assert second.label == "3"


@pytest.mark.parametrize("body", ["prompt,label\na,b,c\n", "prompt,label\na\n", 'prompt,label\n"a,b\n'])
def test_a_broken_table_names_file_and_line(tmp_path: Path, body: str) -> None:
    (tmp_path / "bad.csv").write_text(body)
    with pytest.raises(DataError, match=r"bad\.csv.*(line 2 has not as many cells|is not a readable table)"):
        read(tmp_path / "bad.csv")


def test_columns_that_are_named_must_be_there(tmp_path: Path) -> None:
    path = jsonl(tmp_path, json.dumps({"prompt": "a", "answer": "1"}) + "\n")
    assert read(path)[0].label is None
    with pytest.raises(DataError, match=r"--label-key = 'anwser': is no column of .*data.jsonl. Did you mean --label-key answer\?"):
        read(path, label_key="anwser")
    (task,) = read(path, label_key="answer")
    assert (task.label, task.metadata) == ("1", {"answer": "1"})


def test_the_form_of_verl_is_read_by_paths(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), path)
    (task,) = read(path, label_key="reward_model.ground_truth")
    assert (task.prompt, task.label) == (row["prompt"], "2")
    assert task.metadata["data_source"] == "openai/gsm8k"
    with pytest.raises(DataError, match=r"Did you mean --label-key reward_model.ground_truth\?"):
        read(path, label_key="reward_model.groundtruth")


def test_a_label_reaches_a_reward_of_trl_under_its_column(tmp_path: Path) -> None:
    def accuracy_reward(completions: list[str], answer: list[str], **kw: Any) -> list[float]:
        return [float(given == wanted) for given, wanted in zip(completions, answer, strict=True)]

    (task,) = read(jsonl(tmp_path, json.dumps({"prompt": "a", "answer": "1"}) + "\n"), label_key="answer")
    form = form_of(accuracy_reward, "judge.py: accuracy_reward")
    state = StepState(task=task, label=task.label, observation_text="a", action_text="1")
    assert form.call(accuracy_reward, state, "here") == [1.0]


def test_images_of_a_row_are_those_of_its_task(tmp_path: Path) -> None:
    image = {"bytes": b"\x89PNG1", "path": None}
    rows = pa.table({"prompt": ["a", "b", "c"], "images": [[image, image], [], None], "level": [1, 2, 3]})
    parquet.write_table(rows, tmp_path / "data.parquet")
    one, two, three = read(tmp_path / "data.parquet")
    assert one.images == ("data:image/png;base64,iVBORzE=",) * 2
    assert (two.images, three.images, one.metadata) == ((), (), {"level": 1})
    path = jsonl(tmp_path, '{"prompt": "a", "picture": "a.png", "images": "x"}\n')
    (named,) = read(path, image_key="picture")
    assert (named.images, named.metadata) == (("a.png",), {"images": "x"})


def test_what_is_no_image_is_refused_by_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: column 'images', number 1 is no image.*--image-key"):
        read(jsonl(tmp_path, '{"prompt": "a", "images": []}\n{"prompt": "b", "images": ["a.png", 3]}\n'))


def test_marks_of_a_prompt_with_images_are_their_places(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"prompt": "A <image> here", "images": ["a.png"]}\n{"prompt": "B <image>"}\n')
    one, two = read(path)
    parts = [{"type": "text", "text": "A "}, {"type": "image"}, {"type": "text", "text": " here"}]
    assert (one.prompt, two.prompt) == ([{"role": "user", "content": parts}], "B <image>")
    assert read(path, marks=False)[0].prompt == "A <image> here"
    with pytest.raises(DataError, match="line 1: the texts have 1 marks <image> and there are 2 images"):
        read(jsonl(tmp_path, '{"prompt": "A <image> here", "images": ["a.png", "b.png"]}\n'))


ROWS = '{"prompt": "a"}\n{"prompt": "b"}\n'
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
}


@pytest.mark.parametrize("packing", PACKERS)
def test_packed_files_are_read(packing: str, tmp_path: Path) -> None:
    lines, table = tmp_path / f"train.jsonl{packing}", tmp_path / f"train.csv{packing}"
    lines.write_bytes(PACKERS[packing](ROWS.encode()))
    table.write_bytes(PACKERS[packing]('prompt,label\n"a\nb",1\n'.encode("utf-8-sig")))
    assert [task.prompt for task in read(lines)] == ["a", "b"]
    assert [(task.prompt, task.label) for task in read(table)] == [("a\nb", "1")]
    assert len(read(tmp_path)) == 3
    assert [part.name for part in read_prompts([str(lines), str(write(tmp_path / "more.jsonl", "c"))], PromptFormat())] == ["train", "more"]
    lines.write_bytes(lines.read_bytes()[:-9])
    with pytest.raises(DataError, match="is not UTF-8 text"):
        read(lines)


def test_lines_of_a_text_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\n\n two \n", encoding="utf-8")
    assert [task.prompt for task in read(path, input_key="text")] == ["one", " two "]
    with pytest.raises(DataError, match=r"'prompt': is no column of .* Its columns are text"):
        read(path)


@pytest.mark.parametrize("name", ["rows.dat", "rows.parquet.gz", "rows.txt.zip", "rows"])
def test_a_file_of_another_kind_is_never_taken_for_a_name_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / name).write_text(ROWS)
    with pytest.raises(DataError, match=r"is a file of a kind that is not read\. Give a file .*\.jsonl.*\.gz"):
        read(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is a file of a kind that is not read"):
        read(name)


def test_objects_over_several_lines_are_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "more": {"x": [1]}}, {"prompt": "b"}]
    for given in (rows[:1], rows):
        assert [task.prompt for task in read(jsonl(tmp_path, "\n" + "\n".join(json.dumps(row, indent=2) for row in given)))] == [
            row["prompt"] for row in given
        ]
    bad: list[str] = []
    assert [task.prompt for task in read(jsonl(tmp_path, '{"prompt": "a\n' + ROWS), bad=bad)] == ["a", "b"]
    assert bad[0].startswith("line 1 is not JSON")


def test_the_label_of_verls_data_sets_is_read_where_they_have_it(tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": "1+1?",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"answer": "#### 2"},
    }
    (task,) = read(jsonl(tmp_path, json.dumps(row)))
    assert (task.label, task.metadata["data_source"], task.metadata["extra_info"]) == ("2", "gsm8k", {"answer": "#### 2"})
    assert read(jsonl(tmp_path, json.dumps({**row, "label": "two"})))[0].label == "two"
    assert read(jsonl(tmp_path, json.dumps(row)), label_key="extra_info.answer")[0].label == "#### 2"


def test_a_folder_named_like_a_setting_is_no_column(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "label=wrong" / "rows.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), file)
    ((_, row),) = read_rows(str(file), PromptFormat())
    assert row == {"prompt": "a"}
