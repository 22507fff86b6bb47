"""Folders of programs, walked while they change, however deep and closed they are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.core.errors import SandboxError
from agentrl.env.sandbox import files, folders, trees
from agentrl.env.sandbox.files import copy_out_beneath
from agentrl.env.sandbox.trees import FILE_BYTES

DEEP = 1200
DEEPER = f"""
import os, sys
os.chdir(sys.argv[1])
for number in range({DEEP}):
    os.mkdir("d" * 50)
    os.chdir("d" * 50)
open("bottom", "w").write("x" * 5000)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "deep"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", DEEPER, str(folder)], check=True)
    yield folder
    trees.remove(folder)  # which pytest cannot


def test_what_is_deeper_than_any_path_is_counted_and_removed(deep: Path) -> None:
    assert trees.size(deep) >= DEEP * FILE_BYTES + 5000
    trees.remove(deep)
    assert not deep.exists()


@pytest.mark.linux
def test_few_descriptors_are_open_at_once(deep: Path) -> None:
    counts = []
    with trees.opened(deep) as top:
        trees.visit(top, lambda here, name, status: counts.append(len(os.listdir("/proc/self/fd")) if name == "bottom" else 0))
        assert len(counts) == DEEP + 1
        after = len(os.listdir("/proc/self/fd"))
        assert max(counts) <= after + 1
    with trees.opened(deep) as top:
        trees.visit(top, lambda here, name, status: None)
        assert len(os.listdir("/proc/self/fd")) == after


def test_folders_of_a_process_that_is_gone_are_removed_though_they_are_deep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    abandoned = tmp_path / f"{folders.PREFIX}old"
    (abandoned / "sandbox").mkdir(parents=True)
    (abandoned / folders.LOCK).touch()
    subprocess.run([sys.executable, "-c", DEEPER, str(abandoned / "sandbox")], check=True)
    assert folders.remove_abandoned() == [abandoned]
    assert not abandoned.exists()


def test_the_program_that_outlives_its_owner_removes_deep_folders(deep: Path) -> None:
    program = [sys.executable, "-I", "-S", str(Path(trees.__file__).with_name("reaper.py")), f"machine:{deep}", "true"]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.communicate(timeout=60)  # the pipe closes, and its standard output is open until it ends
    assert not deep.exists()


REMOVE = """
import importlib.util, os, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("trees", sys.argv[1])
trees = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trees)
if os.geteuid() == 0:  # who needs no rights
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
folder = Path(sys.argv[2], "closed")
(folder / "a" / "b").mkdir(parents=True)
(folder / "a" / "b" / "file").touch()
for place in (folder / "a" / "b", folder / "a"):
    place.chmod(0)
trees.remove(folder)
"""


def test_rights_that_were_taken_away_do_not_keep_a_folder() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        subprocess.run([sys.executable, "-I", "-S", "-c", REMOVE, trees.__file__, place], check=True, cwd="/")
        assert not Path(place, "closed").exists()


def test_a_sparse_file_counts_with_its_length(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(60 * 2**20)
    assert trees.size(tmp_path) >= 60 * 2**20


def test_empty_files_count_too_and_links_are_no_folders(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / str(number)).touch()
    assert trees.size(tmp_path) == 10 * FILE_BYTES
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory"), trees.opened(tmp_path / "link"):
        pass


def test_a_copy_keeps_holes_and_has_a_limit(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox"
    (folder / "out" / "inner").mkdir(parents=True)
    (folder / "out" / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "out" / "pipe")
    (folder / "out" / "plain").write_bytes(b"p" * 100)
    with (folder / "out" / "inner" / "sparse").open("wb") as file:
        file.seek(2**20)
        file.write(b"middle")
        file.truncate(8 * 2**20)
    limit = 8 * 2**20 + 100
    copy_out_beneath(folder, "out", tmp_path / "copy", limit)
    copied = tmp_path / "copy" / "inner" / "sparse"
    assert copied.read_bytes() == (folder / "out" / "inner" / "sparse").read_bytes()
    assert copied.stat().st_blocks * 512 < 2**20
    assert (tmp_path / "copy" / "plain").read_bytes() == b"p" * 100
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["inner", "plain"]
    with pytest.raises(SandboxError, match=f"'out' of a sandbox holds more than its limit of {limit - 1} bytes"):
        copy_out_beneath(folder, "out", tmp_path / "again", limit - 1)
    assert sum(path.stat().st_size for path in (tmp_path / "again").rglob("*") if path.is_file()) < limit


def test_a_folder_that_is_moved_meanwhile_hides_nothing_else(tmp_path: Path) -> None:
    for name in ("a/b/c", "other", "a/later"):
        (tmp_path / "top" / name).mkdir(parents=True)
    for name in (*(f"a/{number}" for number in range(200)), "a/one", "a/later/two", "other/three", "a/b/c/four"):
        (tmp_path / "top" / name).touch()
    seen = []

    def entry(here: int, name: str, status: os.stat_result) -> None:
        seen.append(name)
        if name == "four":
            os.rename(tmp_path / "top" / "a" / "b", tmp_path / "elsewhere")

    with trees.opened(tmp_path / "top") as top:
        trees.visit(top, entry)
    assert {"one", "two", "three", "four", *map(str, range(200))} <= set(seen)
    assert not {path.name for path in tmp_path.iterdir()} & set(seen)


@needs_root
def test_no_file_outside_is_given_away_while_folders_and_links_change_places(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = tmp_path / "sandbox"
    (folder / "real").mkdir(parents=True)
    for number in range(800):
        (folder / "real" / str(number)).touch()
    (folder / "real" / "file").touch()
    (folder / "link").symlink_to(outside)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for one, two in (("real", "spare"), ("link", "real"), ("real", "link"), ("spare", "real")):
                os.rename(folder / one, folder / two)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for number in range(40):
            trees.give(folder, 65534 - number % 2)
    finally:
        done.set()
        swapping.join()
    assert (outside.stat().st_uid, (outside / "file").stat().st_uid) == (0, 0)


def test_a_file_that_is_too_large_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    with pytest.raises(SandboxError, match="holds more than 10 bytes"):
        files.read_beneath(tmp_path, "file", 10)
