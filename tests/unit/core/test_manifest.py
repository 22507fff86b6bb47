"""Hashes in threads: the written-out formula, damage of every kind, files shared out among ranks."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from agentrl.core import manifest
from agentrl.core.errors import CheckpointError
from agentrl.core.manifest import FileEntry, differing_files, flush_files, manifest_text, parse_manifest, read_manifest, shares

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "PART", PART)
    monkeypatch.setattr(manifest, "BLOCK", 300)


def written(folder: Path, **sizes: int) -> dict[str, bytes]:
    contents = {name: random.Random(name).randbytes(size) for name, size in sizes.items()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


def test_a_small_file_has_its_hash_and_a_large_one_that_of_the_hashes_of_its_parts(tmp_path: Path) -> None:
    contents = written(tmp_path, empty=0, small=PART, large=2 * PART + 1)
    entries = flush_files(tmp_path, contents)
    for name in ("empty", "small"):
        assert entries[name] == {"size": len(contents[name]), "sha256": hashlib.sha256(contents[name]).hexdigest()}
    large = contents["large"]
    digests = b"".join(hashlib.sha256(part).digest() for part in (large[:PART], large[PART : 2 * PART], large[2 * PART :]))
    assert entries["large"] == {"size": 2001, "part_bytes": PART, "sha256_of_parts": hashlib.sha256(digests).hexdigest()}
    assert differing_files(entries, tmp_path) == []


def test_a_large_file_of_an_older_version_has_one_hash(tmp_path: Path) -> None:
    content = written(tmp_path, large=5 * PART)["large"]
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert differing_files({"large": entry}, tmp_path) == []
    (tmp_path / "large").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert differing_files({"large": entry}, tmp_path) == ["large"]


@pytest.mark.parametrize("place", [0, PART - 1, PART, 2 * PART, 2 * PART + 499])
def test_one_bit_anywhere_is_found(tmp_path: Path, place: int) -> None:
    contents = written(tmp_path, one=2 * PART + 500, two=10)
    entries = flush_files(tmp_path, contents)
    damaged = bytearray(contents["one"])
    damaged[place] ^= 16
    (tmp_path / "one").write_bytes(damaged)
    assert differing_files(entries, tmp_path) == ["one"]


def test_parts_that_changed_places_are_found(tmp_path: Path) -> None:
    content = written(tmp_path, one=2 * PART + 1)["one"]
    entries = flush_files(tmp_path, ["one"])
    (tmp_path / "one").write_bytes(content[PART : 2 * PART] + content[:PART] + content[2 * PART :])
    assert differing_files(entries, tmp_path) == ["one"]


def test_files_that_are_cut_grown_or_gone_are_found(tmp_path: Path) -> None:
    contents = written(tmp_path, cut=PART + 9, grown=5, gone=5, kept=5)
    entries = flush_files(tmp_path, contents)
    (tmp_path / "cut").write_bytes(contents["cut"][:-1])
    (tmp_path / "grown").write_bytes(contents["grown"] + b"x")
    (tmp_path / "gone").unlink()
    assert differing_files(entries, tmp_path) == ["cut", "gone", "grown"]


def test_a_manifest_that_is_cut_off_or_of_another_form_is_none(tmp_path: Path) -> None:
    written(tmp_path, one=3)
    text = manifest_text(flush_files(tmp_path, ["one"]))
    assert parse_manifest(text)["one"]["size"] == 3
    for broken in (text[: len(text) // 2], "[]", "{}", '{"files": {"one": {}}}', '{"files": [1]}', ""):
        with pytest.raises(ValueError, match=r"lists no files|Expecting|delimiter|Unterminated"):
            parse_manifest(broken)
        (tmp_path / "manifest.json").write_text(broken)
        with pytest.raises(CheckpointError, match="is not complete"):
            read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="another form"):
        differing_files({"one": {"size": 3}}, tmp_path)


def entry(size: int, rank: int | None = None) -> FileEntry:
    return {"size": size, **({} if rank is None else {"rank": rank})}


def test_as_many_ranks_as_wrote_get_what_they_wrote() -> None:
    files = {"model": entry(100, 0), "part-0": entry(7, 0), "part-1": entry(8, 1)}
    assert [sorted(part) for part in shares(files, 2)] == [["model", "part-0"], ["part-1"]]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_other_ranks_get_about_as_many_bytes_and_each_file_goes_to_one(count: int) -> None:
    files = {f"part-{index}": entry(50 + index, rank=index % 2) for index in range(30)}
    parts = shares(files, count)
    assert len(parts) == count
    assert sorted(name for part in parts for name in part) == sorted(files)
    loads = [sum(entry["size"] for entry in part.values()) for part in parts]
    assert max(loads) - min(loads) <= 79
    assert all(part[name] == files[name] for part in parts for name in part)


def test_files_that_no_rank_wrote_are_shared_out_too() -> None:
    assert shares({"one": entry(5), "two": entry(4, 0)}, 2) == [{"one": entry(5)}, {"two": entry(4, 0)}]
    assert shares({}, 2) == [{}, {}]
