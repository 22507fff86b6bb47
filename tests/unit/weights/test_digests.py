"""Weights of engines are compared with the learner's: whatever the way that they took, errors are found and named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("vllm")

from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError, WeightsDifferError
from agentrl.core.protocols import Membership, WeightUpdate
from agentrl.flow.pool import RolloutPool
from agentrl.flow.worker_slots import Supervision
from agentrl.learner.learner import LearnerRank
from agentrl.resolve.commands import load_config
from agentrl.resolve.parts import learner_plan
from agentrl.weights import digests
from agentrl.weights.digests import DIGESTS, check, digest, expected, found_in, joined
from agentrl.weights.sender import SharedMemorySender
from tests.group_support import Engine, sender
from tests.learner_support import make_settings
from tests.unit.flow.fakes import ScriptedWorker

EMBEDDING, HEAD = "embed.weight", "head.weight"
ENGINE = "engine-0"


def weights(version: int) -> list[tuple[str, Tensor]]:
    torch.manual_seed(version)
    layers = [(f"layer.{index}.weight", torch.randn(12, 12)) for index in range(6)]
    return [(EMBEDDING, torch.randn(20, 12)), *layers, ("norm.weight", torch.randn(12))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_digests_of_parts_add_up_and_tell_of_every_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = torch.randn(12, 10)
    want = digest(whole, dtype)
    rows = [digest(whole[start : start + 4], dtype, row=start) for start in (0, 4, 8)]
    columns = [digest(whole[:, start : start + 5], dtype, column=start) for start in (0, 5)]
    assert sum(rows) % 2**64 == sum(columns) % 2**64 == want
    assert digest(whole.view(12, 5, 2), dtype) == want  # what is behind the first dimension counts as one
    monkeypatch.setattr(digests, "CHUNK", 16)
    assert digest(whole, dtype) == want
    for wrong in (whole.flip(0), whole.flip(1), whole.roll(1, 0), torch.where(torch.eye(12, 10) > 0, whole, -whole), whole * 1.01):
        assert digest(wrong, dtype) != want
    for place in (0, 57, 119):
        other = whole.clone()
        other.view(-1)[place] += 0.125
        assert digest(other, dtype) != want


def test_the_sign_of_zero_and_the_way_to_a_type_do_not_count() -> None:
    assert digest(torch.tensor([0.0, -0.0]), torch.float32) == digest(torch.tensor([-0.0, 0.0]), torch.float32)
    precise = torch.randn(100)
    assert (
        digest(precise, torch.bfloat16) == digest(precise.bfloat16(), torch.bfloat16) == digest(precise.bfloat16().float(), torch.bfloat16)
    )
    assert digest(torch.tensor(3), torch.float32) != digest(torch.tensor(4), torch.float32)


class Gloo:
    """A broadcast of torch's gloo."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def begin(self, bucket: Tensor) -> Callable[[], object]:
        done: Callable[[], object] = self.group.broadcast(bucket, 0).wait
        return done

    def end(self) -> None:
        return

    def abort(self) -> None:
        return


def connect_gloo(store: Any, rank: int, size: int, device: torch.device) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    return Gloo(ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=30)))


class Receiver(Engine):
    """An engine of one worker with a fault; its output layer is tied to the embedding and has a copy of its own, as vLLM's on a CPU."""

    def __init__(self, kind: Any, fault: str) -> None:
        super().__init__(ENGINE, kind)
        self.fault, self.calls = fault, 0

    def _load(self, pairs: Any) -> None:
        self.calls += 1
        if self.fault == "skipped bucket" and self.calls == 2:
            return
        for name, tensor in pairs:
            if self.fault == "stale tensor" and name == "layer.3.weight" and name in self.loaded:
                continue
            kept = tensor.T if self.fault == "transposed" and name == "layer.2.weight" else tensor
            self.loaded[name] = kept.contiguous().clone()

    def found(self, dtype: str) -> Any:
        if self.fault != "tied head" or HEAD not in self.loaded:
            self.loaded[HEAD] = self.loaded[EMBEDDING].clone()
        found = dict(found_in(self.loaded.items(), dtype))
        found[HEAD] = (EMBEDDING, found[HEAD][1])
        return found


class Way:
    """One way of weights to an engine, with a fault at its end."""

    def __init__(self, kind: str, fault: str, folder: Path) -> None:
        self.kind, self.receiver = kind, Receiver("ipc" if kind == "ipc" else "nccl", fault)
        self.files = kind in ("shm", "disk")
        self.sender: Any = SharedMemorySender(folder) if self.files else sender("ipc" if kind == "ipc" else "nccl", bucket_bytes=1200)
        if kind == "gloo":
            self.sender._connect = self.receiver.member._connect = connect_gloo

    def publish(self, version: int) -> WeightUpdate:
        members = None if self.files else Membership(1, (ENGINE,))
        update = self.sender.send(weights(version), version, members)
        self.receiver.calls = 0
        if self.files:
            pairs = list(load_file(update.payload["update"]["path"]).items())
            self.receiver._load(pairs[:3])
            self.receiver._load(pairs[3:5])
            self.receiver._load(pairs[5:])
        else:
            assert self.receiver.take(update) == ""
            self.sender.settle()
        return replace(update, payload={**update.payload, DIGESTS: expected(weights(version), "float32")})


@pytest.mark.parametrize("kind", ["shm", "disk", "gloo", "sockets", "ipc"])
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("", ""),
        ("skipped bucket", r"[2-4] of 9 tensors .*: layer\.\d\.weight, "),
        ("stale tensor", r"1 of 9 tensors .*: layer\.3\.weight\."),
        ("transposed", r"1 of 9 tensors .*: layer\.2\.weight\."),
        ("tied head", r"1 of 9 tensors .*: head\.weight\."),
    ],
)
def test_planted_errors_are_found_and_named_on_every_way(kind: str, fault: str, named: str, tmp_path: Path) -> None:
    way = Way(kind, "", tmp_path)
    try:
        first = way.publish(1)
        assert check(first.payload[DIGESTS], way.receiver.found("float32"), engine=ENGINE, version=1) == []
        way.receiver.fault = fault
        second = way.publish(2)
        found = way.receiver.found("float32")
        if not fault:
            assert check(second.payload[DIGESTS], found, engine=ENGINE, version=2) == []
            return
        with pytest.raises(WeightsDifferError, match=f"engine-0: after the publication of version 2, {named}") as caught:
            check(second.payload[DIGESTS], found, engine=ENGINE, version=2)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    finally:
        way.sender.close()
        way.receiver.member.leave()


def test_workers_of_an_engine_have_parts_and_tensors_that_nobody_has_are_told() -> None:
    named = dict(weights(1))
    wanted = expected(named.items(), "float32")
    whole = named["layer.0.weight"]
    halves = [
        {"layer.0.weight": ["layer.0.weight", digest(part, torch.float32, row=row)]} for row, part in ((0, whole[:6]), (6, whole[6:]))
    ]
    signed = [{name: [of, value - 2**64 if value >= 2**63 else value] for name, (of, value) in half.items()} for half in halves]
    left = check(wanted, joined(signed), engine=ENGINE, version=1)
    assert left == sorted(named.keys() - {"layer.0.weight"})


class Differing(ScriptedWorker):
    """A worker whose engine holds other weights than the learner, from the start or once it replaces another."""

    def __init__(self, differs: bool, dies: bool = False) -> None:
        super().__init__()
        self.differs, self.dies = differs, dies

    async def load_weights(self, update: WeightUpdate) -> int:
        if self.dies:
            raise EngineDeadError("killed")
        if self.differs:
            raise WeightsDifferError("layer.3.weight differs")
        return update.version


@pytest.mark.parametrize("replaced", [False, True])
def test_a_difference_ends_the_run_and_no_other_engine_is_tried(replaced: bool) -> None:
    made = list[str]()

    async def respawn(name: str) -> Differing:
        made.append(name)
        return Differing(differs=True)

    async def main() -> None:
        first = Differing(differs=not replaced, dies=replaced)
        pool = RolloutPool({"engine-0": Differing(False), "engine-1": first}, Supervision(respawn=respawn, check_every_s=0.01))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.supervise)
            await anyio.sleep(0.02)
            await pool.publish(WeightUpdate(version=1, transport="scripted"))
            await anyio.sleep(5)

    with pytest.raises(ExceptionGroup) as caught:
        anyio.run(main)
    assert caught.group_contains(WeightsDifferError, match=r"layer.3.weight differs")
    assert made == (["engine-1"] if replaced else [])


def test_the_learner_adds_digests_to_the_first_publication_of_each_group_and_then_every_so_often() -> None:
    rank = LearnerRank(replace(make_settings("none"), verify_every=4), SharedMemorySender())
    rank._state: Any = SimpleNamespace(named_weights=lambda: iter(weights(0)), ranks=SimpleNamespace(first=True), close=lambda: None)
    try:
        compared = [
            version
            for version in range(1, 10)
            if DIGESTS in (rank.export_weights(version) or WeightUpdate(version=0, transport="")).payload
        ]
        assert compared == [1, 4, 8]
        rank._sender = SimpleNamespace(  # type: ignore[assignment]
            every_rank=True,
            abandon=lambda reason: None,
            send=lambda named, version, members: WeightUpdate(version=version, transport="x"),
            close=lambda: None,
        )
        epochs = [
            DIGESTS in rank.export_weights(version, Membership(epoch, ())).payload for version, epoch in ((9, 1), (10, 1), (11, 2), (12, 2))
        ]  # type: ignore[union-attr]
        assert epochs == [True, False, True, True]
        rank._state.ranks.first = False
        assert rank.export_weights(16).payload == {}  # type: ignore[union-attr]
    finally:
        rank.close()


def test_engines_with_other_numbers_are_not_compared() -> None:
    config = load_config(["--agent", "module:Name"])

    def every(**settings: Any) -> int:
        return learner_plan(changed(config, **settings), "cpu").verify_every

    assert (every(), every(verify_weights_every=7), every(verify_weights_every=0)) == (100, 7, 0)
    assert every(lora_rank=8, publish="adapter") == every(engine_args=("quantization=fp8",)) == 0
