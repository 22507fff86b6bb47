"""Images of episodes: which there are, where they belong, and what is never given out as one."""

from __future__ import annotations

import base64
import json

import pytest

from agentrl.inspect.episode import episode_answer, find_records
from agentrl.inspect.foreign import import_file
from agentrl.inspect.reader import RunReader
from agentrl.viewer.collect import write_page
from agentrl.viewer.images import episode_image
from agentrl.viewer.runs import RunCollection
from tests.run_files import MadeRun

PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 8
JPEG = b"\xff\xd8\xff\xe0" + b"0" * 8
WEBP = b"RIFF\0\0\0\0WEBPVP8 "
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def made(path, images):
    run = MadeRun(path)
    run.step(1, [run.group(1, members=1, images=images)])
    return RunReader(run.close()).open()


def test_images_of_observations_stand_before_the_turn_that_reads_them(tmp_path):
    run = made(tmp_path / "run", ((0, url(PNG)), (1, url(JPEG)), (1, url(b"GIF89a0")), (2, url(WEBP))))
    answer = episode_answer(run, "0-0-0")
    assert (answer["images"], answer["task"]["images"]) == (4, 0)
    assert [turn["images"] for turn in answer["turns"]] == [[0], [1, 2]]
    assert answer["unread_images"] == [3]  # shown after the last turn that was sampled
    found = [episode_image(run, "0-0-0", number) for number in range(5)]
    assert found == [(PNG, "image/png"), (JPEG, "image/jpeg"), (b"GIF89a0", "image/gif"), (WEBP, "image/webp"), None]


def with_pictures(run, pictures, task=()):
    """The same run whose first turns have these blocks, one list a turn, and whose task has images."""
    file = run.path / "trajectories.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["task"]["images"] = list(task)
        row["turns"] = [{**turn, "pictures": blocks} for turn, blocks in zip(row["turns"], pictures, strict=False)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.path / "trajectories.index.jsonl").unlink()
    return RunReader(run.path).open()


def test_the_images_of_a_prompt_are_told_apart_with_the_blocks_of_their_tokens(tmp_path):
    one, two, three = ([[place, 2, 2, 0, 0, 1, 1]] for place in (2, 9, 16))
    run = made(tmp_path / "run", ((0, url(PNG)), (1, url(JPEG))))
    turns = episode_answer(with_pictures(run, [[one, two, three], [one]], [url(WEBP), url(PNG)]), "0-0-0")["turns"]
    assert turns[0]["pictures"] == [{"image": place, "blocks": blocks} for place, blocks in enumerate((one, two, three))]
    assert turns[1]["pictures"] == [{"image": 3, "blocks": one}]
    other = made(tmp_path / "other", ((0, url(PNG)), (1, url(JPEG))))
    turns = episode_answer(with_pictures(other, [[one, two], [one, two]]), "0-0-0")["turns"]
    assert [turn["pictures"] for turn in turns] == [[], []]  # more than the record names


@pytest.mark.parametrize(
    "source",
    [
        url(SVG, "image/svg+xml"),
        url(SVG, "image/png"),
        url(b"<html>", "text/html"),
        "data:image/png;base64,no base64!",
        "http://127.0.0.1:1/x.png",
        "an image of 9 characters, not recorded",
        "/etc/passwd",
        "nul\0byte",
    ],
)
def test_what_is_no_image_is_not_given_out(tmp_path, source):
    run = made(tmp_path / "run", ((0, source),))
    assert episode_answer(run, "0-0-0")["turns"][0]["images"] == [0]
    assert episode_image(run, "0-0-0", 0) is None


def test_an_image_of_another_attempt_is_that_attempts(tmp_path):
    run = made(tmp_path / "run", ((0, url(PNG)),))
    [record] = find_records(run, "0-0-0")
    with (run.path / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps({**record, "attempt": 1, "images": [[0, url(JPEG)]]}) + "\n")
    (run.path / "trajectories.index.jsonl").unlink()
    run = RunReader(run.path).open()
    assert [episode_image(run, "0-0-0", 0, attempt)[1] for attempt in (None, 0, 1)] == ["image/jpeg", "image/png", "image/jpeg"]


def messages(image):
    return [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, image]},
        {"role": "assistant", "content": "A cat."},
    ]


def test_data_urls_in_files_of_other_systems_are_shown_and_nothing_else(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    rows = [
        {"prompt": messages({"type": "image_url", "image_url": {"url": url(PNG)}})[:1], "completion": "A dog.", "reward": 1.0},
        {"messages": messages({"type": "image_url", "image_url": {"url": str(tmp_path / "cat.png")}}), "reward": 1.0},
    ]
    source, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir()
    import_file(source, folder)
    run = RunReader(folder).open()
    assert episode_answer(run, "0")["turns"][0]["images"] == [0]
    assert episode_image(run, "0", 0) == (PNG, "image/png")
    assert (episode_answer(run, "1")["images"], "[image_url]" in episode_answer(run, "1")["turns"][0]["prompt_text"]) == (0, True)


def test_images_of_a_log_of_inspect_may_be_attachments(tmp_path):
    sample = {"id": "a", "epoch": 1, "input": "?", "target": "", "scores": {}, "attachments": {"f00": url(PNG)}}
    sample["messages"] = messages({"type": "image", "image": "attachment://f00"})
    (tmp_path / "log.json").write_text(json.dumps({"version": 2, "samples": [sample]}))
    (tmp_path / "run").mkdir()
    import_file(tmp_path / "log.json", tmp_path / "run")
    run = RunReader(tmp_path / "run").open()
    assert [turn["images"] for turn in episode_answer(run, "a-1")["turns"]] == [[0], [1]]
    assert episode_image(run, "a-1", 1) == (PNG, "image/png")


def test_a_run_shows_images_of_its_own_folders_only(tmp_path, monkeypatch):
    for name in ("work/images", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "cat.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path / "work")
    sources = (
        "images/cat.png",
        "../outside/cat.png",
        "../../outside/cat.png",
        "link.png",
        str(tmp_path / "outside" / "cat.png"),
        "kept.png",
    )
    run = made(tmp_path / "runs" / "run", tuple((0, source) for source in sources))
    (tmp_path / "work" / "link.png").symlink_to(tmp_path / "outside" / "cat.png")
    (run.path / "kept.png").write_bytes(PNG)
    (tmp_path / "work" / "kept.png").symlink_to(run.path / "kept.png")
    shown = [episode_image(run, "0-0-0", number) is not None for number in range(len(sources))]
    assert shown == [True, False, False, False, False, True]
    page = tmp_path / "page.html"
    write_page(RunCollection(run.path), page)
    assert page.read_text().count(url(PNG)) == 2


def test_a_run_that_says_it_began_at_the_root_shows_no_other_files(tmp_path):
    (tmp_path / "cat.png").write_bytes(PNG)
    run = made(tmp_path / "run", ((0, str(tmp_path / "cat.png")), (0, str(tmp_path / "cat.png").lstrip("/"))))
    (run.path / "launches.jsonl").write_text(json.dumps({**run.launches[-1], "folder": "/"}) + "\n")
    assert [episode_image(RunReader(run.path).open(), "0-0-0", number) for number in (0, 1)] == [None, None]


def test_a_file_of_another_system_cannot_name_files_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(PNG)
    own = made(tmp_path / "own", ((0, str(tmp_path / "cat.png")), (0, "cat.png")))
    assert [episode_image(own, "0-0-0", number) for number in (0, 1)] == [(PNG, "image/png")] * 2
    (tmp_path / "run").mkdir()
    import_file(own.path / "trajectories.jsonl", tmp_path / "run")
    (tmp_path / "run" / "cat.png").write_bytes(PNG)  # beside the imported file, but nothing that it recorded
    assert [episode_image(RunReader(tmp_path / "run").open(), "0-0-0", number) for number in (0, 1)] == [None, None]
