from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agentrl.core.errors import CheckpointError
from agentrl.core.files import (
    check_directory,
    commit_directory,
    complete_file,
    recover_directory,
    remove_directory,
    replace_directory,
    swap_directory,
    temporary_directory,
    temporary_name,
    write_text,
)
from agentrl.core.manifest import MANIFEST


def made(target: Path) -> Path:
    temporary = temporary_directory(target)
    (temporary / "inner").mkdir()
    (temporary / "inner" / "a.bin").write_bytes(b"abc")
    (temporary / "b.txt").write_text("b")
    commit_directory(temporary, target)
    return target


def test_a_committed_directory_is_complete_and_alone(tmp_path: Path) -> None:
    target = made(tmp_path / "kept" / "one")
    check_directory(target)
    assert os.listdir(tmp_path / "kept") == ["one"]
    assert (target / "inner" / "a.bin").read_bytes() == b"abc"


@pytest.mark.parametrize("damage", ["change", "cut", "remove", "no manifest", "broken manifest", "odd manifest"])
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    target = made(tmp_path / "one")
    file, manifest = target / "inner" / "a.bin", target / MANIFEST
    {
        "change": lambda: file.write_bytes(b"abd"),
        "cut": lambda: file.write_bytes(b"ab"),
        "remove": file.unlink,
        "no manifest": manifest.unlink,
        "broken manifest": lambda: manifest.write_text(manifest.read_text()[:-9]),
        "odd manifest": lambda: manifest.write_text('{"files": [1]}'),
    }[damage]()
    with pytest.raises(CheckpointError, match=r"one.*(is not complete|is not what)"):
        check_directory(target)


def test_what_a_killed_run_left_is_removed_and_never_taken_for_complete(tmp_path: Path) -> None:
    left = temporary_directory(tmp_path / "one")
    (left / "half").write_text("x")
    assert not (tmp_path / "one").exists()
    made(tmp_path / "two")
    assert os.listdir(tmp_path) == ["two"]


def test_a_file_that_a_killed_run_left_half_written_stops_nothing(tmp_path: Path) -> None:
    temporary_name(tmp_path / "summary.json").write_text("{")
    made(tmp_path / "one")
    with complete_file(tmp_path / "summary.json") as partial:
        partial.write_text("{}")
    assert sorted(os.listdir(tmp_path)) == ["one", "summary.json"]


def test_a_text_is_written_whole_or_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")
    assert (path.read_text(encoding="utf-8"), os.listdir(tmp_path)) == ("é", ["settings.json"])


@pytest.mark.parametrize("killed", ["after the first name", "after the second"])
def test_a_directory_is_put_in_the_place_of_another_after_a_kill(tmp_path: Path, killed: str) -> None:
    target, old = tmp_path / "best", tmp_path / ".best.old.partial"
    for folder, text in ((target, "second"), (old, "first")):
        folder.mkdir()
        (folder / "weights").write_text(text)
    if killed == "after the first name":
        shutil.rmtree(target)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "weights").write_text("third")
    swap_directory(tmp_path / "new", target)
    assert os.listdir(tmp_path) == ["best"]
    assert (target / "weights").read_text() == "third"


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    made(tmp_path / "one")
    with pytest.raises(CheckpointError, match="exists"):
        made(tmp_path / "one")
    check_directory(tmp_path / "one")


def test_a_parent_that_is_a_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        temporary_directory(tmp_path / "file" / "one")


def test_removal(tmp_path: Path) -> None:
    remove_directory(made(tmp_path / "one"))
    remove_directory(tmp_path / "never was")
    assert os.listdir(tmp_path) == []


def replaced(target: Path, text: str) -> None:
    temporary = temporary_directory(target)
    (temporary / "b.txt").write_text(text)
    replace_directory(temporary, target)


def test_a_directory_is_replaced_whole(tmp_path: Path) -> None:
    target = made(tmp_path / "one")
    replaced(target, "new")
    check_directory(target)
    assert sorted(os.listdir(target)) == ["b.txt", MANIFEST]
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(("renames", "text"), [(0, "b"), (1, "new"), (2, "new")])
def test_a_replacement_cut_off_anywhere_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, text: str
) -> None:
    target, left = made(tmp_path / "one"), [renames]

    class Killed(BaseException):
        pass

    rename = Path.rename

    def counted(self: Path, to: Path) -> Path:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted)
        if renames < 2:
            with pytest.raises(Killed):
                replaced(target, "new")
        else:
            replaced(target, "new")
    recover_directory(target)
    check_directory(target)
    assert (target / "b.txt").read_text() == text


def test_nothing_half_written_is_recovered(tmp_path: Path) -> None:
    (temporary_directory(tmp_path / "one") / "b.txt").write_text("half")
    recover_directory(tmp_path / "one")
    assert not (tmp_path / "one").exists()
