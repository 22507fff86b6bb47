import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.errors import WeightSyncError
from agentrl.weights.sender import AdapterSender, SharedMemorySender


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[SharedMemorySender]:
    sender = SharedMemorySender(tmp_path)
    yield sender
    sender.close()


def path_of(update: object) -> Path:
    return Path(update.payload["update"]["path"])  # type: ignore[attr-defined]


def test_a_file_holds_exactly_what_was_sent(sender: SharedMemorySender) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.bfloat16)}
    update = sender.send(tensors.items(), 3)
    assert (update.version, update.transport) == (3, "shm")
    loaded = load_file(path_of(update))
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) and loaded[name].dtype == tensors[name].dtype for name in tensors)


def test_a_tensor_may_be_reused_once_the_next_is_asked_for(sender: SharedMemorySender) -> None:
    buffer = torch.zeros(4)

    def lent() -> Iterator[tuple[str, torch.Tensor]]:
        for value in range(3):
            buffer.fill_(value)
            yield f"p{value}", buffer

    loaded = load_file(path_of(sender.send(lent(), 1)))
    assert [float(loaded[f"p{value}"][0]) for value in range(3)] == [0, 1, 2]


def test_tied_and_transposed_tensors_are_written(sender: SharedMemorySender) -> None:
    weight = torch.randn(4, 3)
    loaded = load_file(path_of(sender.send([("embed", weight), ("head", weight), ("turned", weight.T)], 1)))
    assert torch.equal(loaded["head"], weight)
    assert torch.equal(loaded["turned"], weight.T)


def test_the_version_before_stays_and_older_ones_go(sender: SharedMemorySender) -> None:
    paths = [path_of(sender.send([("a", torch.zeros(2))], version)) for version in range(1, 5)]
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_the_latest_version_that_is_held_stays_too(tmp_path: Path) -> None:
    held = SharedMemorySender(tmp_path, lambda version: version % 3 == 0)
    paths = [path_of(held.send([("a", torch.zeros(2))], version)) for version in range(1, 6)]
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    paths += [path_of(held.send([("a", torch.zeros(2))], version)) for version in range(6, 9)]
    assert [path.exists() for path in paths] == [False] * 5 + [True, True, True]
    held.close()
    assert list(tmp_path.iterdir()) == []


def test_the_latest_adapter_that_is_held_stays_too(tmp_path: Path) -> None:
    held = AdapterSender(rank=4, alpha=8, kept=1, root=tmp_path, held=lambda version: version % 3 == 0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    folders = [Path(held.send([(name, torch.zeros(2, 2))], version).payload["path"]) for version in range(1, 8)]
    assert [folder.exists() for folder in folders] == [False] * 5 + [True, True]
    held.close()


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    sender = SharedMemorySender(tmp_path)
    path = path_of(sender.send([("a", torch.zeros(2))], 1))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    sender.close()
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_uses_is_not(tmp_path: Path, sender: SharedMemorySender) -> None:
    code = (
        "import os, sys, pathlib, torch; from agentrl.weights.sender import AdapterSender, SharedMemorySender;"
        "s = SharedMemorySender(pathlib.Path(sys.argv[1])); s.send([('a', torch.zeros(2))], 1); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    abandoned = list(tmp_path.iterdir())
    assert len(abandoned) == 1
    mine = path_of(sender.send([("a", torch.zeros(2))], 1))
    other = SharedMemorySender(tmp_path)
    try:
        other.send([("a", torch.zeros(2))], 1)
        assert not abandoned[0].exists()
        assert mine.exists()
    finally:
        other.close()


def test_too_little_space_says_what_to_do(sender: SharedMemorySender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=16))
    with pytest.raises(WeightSyncError, match="shm-size"):
        sender.send([("a", torch.zeros(1000))], 1)


def test_a_failed_write_leaves_no_file(sender: SharedMemorySender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_written(_: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("agentrl.weights.sender.save_file", half_written)
    with pytest.raises(WeightSyncError, match="No space"):
        sender.send([("a", torch.zeros(2))], 1)
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_learner_side_needs_no_vllm() -> None:
    code = "import sys, agentrl.weights.sender, agentrl.weights.cuda; print('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_an_adapter_is_a_directory_of_its_own_each_time_it_is_sent(tmp_path: Path) -> None:
    sender = AdapterSender(rank=4, alpha=8, kept=2, root=tmp_path)
    names = [f"base_model.model.model.layers.0.self_attn.{layer}_proj.lora_{part}.weight" for layer in "qv" for part in "AB"]
    updates = [sender.send(((name, torch.full((2, 2), float(value))) for name in names), 1) for value in range(4)]
    assert [(update.version, update.transport) for update in updates] == [(1, "adapter")] * 4
    folders = [Path(update.payload["path"]) for update in updates]
    assert len(set(folders)) == 4
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    assert float(load_file(folders[3] / "adapter_model.safetensors")[names[0]][0, 0]) == 3.0
    saved = json.loads((folders[3] / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["use_rslora"], saved["target_modules"]) == (4, 8, False, ["q_proj", "v_proj"])
    sender.close()
    assert not folders[3].exists()
