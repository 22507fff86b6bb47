"""Files of other systems, and records written for other viewers."""

from __future__ import annotations

import base64
import json
import struct
import zipfile
import zlib

import pytest

from agentrl.api.viewing import open_library
from agentrl.core.errors import ConfigError
from agentrl.inspect.episode import episode_answer
from agentrl.inspect.foreign import import_file
from agentrl.inspect.listing import episode_list
from agentrl.inspect.reader import RunReader
from agentrl.inspect.telemetry import export_inspect, export_spans
from tests.run_files import MadeRun, read, small_run

OPENRLHF = [
    {"input": "2+2=?", "output": "4", "reward": 1.0, "label": "4"},
    {"prompt": "3+3=?", "response": "7", "reward": [0.25, 0.25]},
    {"unrelated": 1},
]
VERIFIERS = [
    {
        "example_id": 3,
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look it up."}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": "{}"}}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "It is so."},
        ],
        "answer": "so",
        "reward": 0.5,
        "correct": 0.0,
        "total_ms": 1500,
        "info": {"source": "x"},
    }
]
INSPECT = [
    {
        "id": "a",
        "epoch": 2,
        "input": "Why?",
        "target": "because",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, {"role": "assistant", "content": "Because."}],
        "scores": {"match": {"value": "C"}, "length": {"value": 0.5}},
        "total_time": 2.0,
    },
    {"id": "b", "epoch": 1, "input": "?", "target": "", "messages": [], "scores": {}, "error": {"message": "it broke"}},
]


def imported(tmp_path, name, write):
    source, folder = tmp_path / name, tmp_path / "run"
    folder.mkdir()
    write(source)
    count = import_file(source, folder)
    return count, RunReader(folder).open()


def lines(rows, end=""):
    return lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def test_lines_with_prompt_answer_and_reward(tmp_path):
    count, run = imported(tmp_path, "data.jsonl", lines(OPENRLHF, '{"cut'))
    assert count == 2
    rows = episode_list(run, {}, sort="time")["rows"]
    assert [(row["reward"], row["last"], row["group"]) for row in rows] == [(1.0, "4", 0), (0.5, "7", 1)]
    first = episode_answer(run, rows[0]["episode"])
    assert (first["turns"][0]["prompt_messages"], first["task"]["label"]) == ([{"role": "user", "text": "2+2=?"}], "4")
    assert (first["turns"][0]["tokens"]["ids"], first["fields"]) == ([], [])


def test_results_of_verifiers(tmp_path):
    _, run = imported(tmp_path, "results.jsonl", lines(VERIFIERS))
    answer = episode_answer(run, "3-0")
    assert [view["text"] for view in answer["turns"]] == ['{"function": {"name": "search", "arguments": "{}"}}', "It is so."]
    assert [message["role"] for message in answer["turns"][0]["prompt_messages"]] == ["system", "user"]
    assert answer["turns"][1]["prompt_messages"] == [{"role": "tool", "text": "found"}]
    assert (answer["metrics"], answer["timings"], answer["trajectories"][0]["reward"]) == ({"correct": 0.0}, {"total_s": 1.5}, 0.5)


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"version": 2}))
        for sample in INSPECT:
            file.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))


def newer_archive(path):
    """An archive compressed with zstd, as Inspect writes it."""
    pyarrow = pytest.importorskip("pyarrow")
    archive(path)
    with zipfile.ZipFile(path) as plain:
        files = {item.filename: plain.read(item) for item in plain.infolist()}
    out, central = bytearray(), bytearray()
    for name, data in files.items():
        packed, start = bytes(pyarrow.compress(data, "zstd")), len(out)
        sizes = (zlib.crc32(data), len(packed), len(data), len(name))
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 93, 0, 0, *sizes, 4) + name.encode() + b"\0\0\0\0" + packed
        central += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 93, 0, 0, *sizes, 0, 0, 0, 0, 0, start) + name.encode()
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(files), len(files), len(central), len(out), 0)
    path.write_bytes(bytes(out + central) + end)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("log.eval", archive),
        ("log.eval", newer_archive),
        ("log.json", lambda path: path.write_text(json.dumps({"version": 2, "samples": INSPECT}))),
    ],
)
def test_logs_of_inspect(tmp_path, name, write):
    count, run = imported(tmp_path, name, write)
    assert count == 2
    good, bad = episode_answer(run, "a-2"), episode_answer(run, "b-1")
    assert (good["trajectories"][0]["reward"], good["trajectories"][0]["reward_parts"]) == (1.0, {"match": 1.0, "length": 0.5})
    assert (good["turns"][0]["text"], good["turns"][0]["prompt_messages"]) == ("Because.", [{"role": "user", "text": "Why?"}])
    assert (bad["status"], bad["error"], bad["trajectories"][0]["reward"]) == ("env_error", "it broke", None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.csv", "a,b", "no known kind of file"),
        ("x.jsonl", "no JSON\n", "holds no episode"),
        ("x.json", "[1]", "no log of Inspect"),
        ("x.json", "{", "cannot be read"),
        ("x.eval", "no archive", "cannot be read"),
        ("x.json", '{"samples": [3]}', "cannot be read"),
    ],
)
def test_what_is_of_no_known_form_is_a_config_error(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=words):
        import_file(tmp_path / name, tmp_path / "run")


def test_a_file_opens_as_a_run_of_its_own_and_a_run_by_its_records(tmp_path):
    lines(OPENRLHF)(tmp_path / "data.jsonl")
    with open_library(tmp_path / "data.jsonl") as library:
        [card] = library.cards()
        assert card["id"] == "data"
        path = library.folder
    assert not path.exists()
    run = small_run(tmp_path / "small")
    with open_library(run / "trajectories.jsonl") as library:
        assert (library.folder, library.single) == (run, True)
    (tmp_path / "copy.jsonl").write_bytes((run / "trajectories.jsonl").read_bytes())
    with open_library(tmp_path / "copy.jsonl") as library:
        assert len(episode_answer(library.run("copy"), "0-0-0")["turns"][0]["tokens"]["ids"]) == 8


def test_spans_are_what_the_protocol_defines(tmp_path):
    json_format = pytest.importorskip("google.protobuf.json_format")
    trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
    run = RunReader(small_run(tmp_path / "run"))
    assert export_spans(run, tmp_path / "spans.jsonl") == 36
    record = next(read(run.path / "trajectories.jsonl"))
    line = next(read(tmp_path / "spans.jsonl"))
    spans = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for span in spans:  # OTLP in JSON has hexadecimal numbers, where protobuf's own form has base64
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    parsed = json_format.Parse(json.dumps(line), trace.TracesData()).resource_spans[0].scope_spans[0].spans
    root, *others = parsed
    assert (len(root.trace_id), len(root.span_id), root.parent_span_id) == (16, 8, b"")
    assert {span.parent_span_id for span in others} == {root.span_id}
    assert len({span.span_id for span in parsed}) == len(parsed) == 6
    assert [span.name for span in others] == [name for name, *_ in record["spans"]]
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(0.4)
    origin = record["ended_s"] - record["group_s"]
    assert others[1].start_time_unix_nano / 1e9 == pytest.approx(origin + record["spans"][1][2], abs=1e-3)
    chat = {item.key: item.value for item in others[1].attributes}
    assert [value.string_value for value in chat["gen_ai.response.finish_reasons"].array_value.values] == ["stop"]
    assert (chat["gen_ai.usage.output_tokens"].int_value, chat["gen_ai.usage.input_tokens"].int_value) == (8, 6)


def test_the_spans_of_tools_are_parts_of_their_steps(tmp_path):
    run = MadeRun(tmp_path / "run")
    run.step(1, [run.group(1, members=1, tool="search")])
    assert export_spans(RunReader(run.close()), tmp_path / "spans.jsonl") == 1
    spans = next(read(tmp_path / "spans.jsonl"))["resourceSpans"][0]["scopeSpans"][0]["spans"]
    steps, tools = ([span for span in spans if span["name"] == name] for name in ("step", "search"))
    assert [tool["parentSpanId"] for tool in tools] == [step["spanId"] for step in steps]
    for step, tool in zip(steps, tools, strict=True):
        assert int(step["startTimeUnixNano"]) < int(tool["startTimeUnixNano"]) < int(tool["endTimeUnixNano"]) < int(step["endTimeUnixNano"])
        about = {item["key"]: item["value"] for item in tool["attributes"]}
        assert about["gen_ai.operation.name"] == {"stringValue": "execute_tool"}
        assert about["gen_ai.tool.name"] == {"stringValue": "search"}


def test_a_log_for_inspect_holds_every_episode(tmp_path):
    run = RunReader(small_run(tmp_path / "run"))
    assert export_inspect(run, tmp_path / "log.json") == 36
    log = json.loads((tmp_path / "log.json").read_text())
    assert len({(sample["id"], sample["epoch"]) for sample in log["samples"]}) == 36
    sample, record = log["samples"][0], next(read(run.path / "trajectories.jsonl"))
    assert [message["role"] for message in sample["messages"]] == ["user", "assistant"] * 2
    assert [message["content"] for message in sample["messages"][1::2]] == [turn["text"] for turn in record["turns"]]
    assert sample["scores"]["reward"]["value"] == record["reward"]
    (tmp_path / "again").mkdir()
    import_file(tmp_path / "log.json", tmp_path / "again")
    again = RunReader(tmp_path / "again").open()
    assert episode_list(again, {})["of"] == 36


@pytest.mark.parametrize("export", [export_inspect, export_spans])
def test_exports_that_cannot_be_written_are_config_errors(tmp_path, export):
    run = RunReader(small_run(tmp_path / "run"))
    suffix = ".json" if export is export_inspect else ".jsonl"
    with pytest.raises(ConfigError, match="Name a file that ends with"):
        export(run, tmp_path / "x.txt")
    with pytest.raises(ConfigError, match="cannot be written"):
        export(run, tmp_path / "nowhere" / f"x{suffix}")
    (tmp_path / f"x{suffix}").touch()
    with pytest.raises(ConfigError, match="exists"):
        export(run, tmp_path / f"x{suffix}")
    (run.path / "trajectories.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"no recorded episode|has no"):
        export(run, tmp_path / f"y{suffix}")
    assert not (tmp_path / f"y{suffix}").exists()
