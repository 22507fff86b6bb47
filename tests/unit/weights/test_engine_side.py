"""The engine's side of publication, with a small module in the place of vLLM's model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("vllm")

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from agentrl.core.errors import TransferAbandonedError
from agentrl.core.protocols import Membership
from agentrl.weights import vllm_backend, vllm_groups
from agentrl.weights.buckets import TensorInfo, _take, as_vllm_reads, describe
from agentrl.weights.channels import SharedBuffers
from agentrl.weights.cuda import GroupSender
from agentrl.weights.rows import RowInvariantLinear
from agentrl.weights.vllm_groups import GroupInit, GroupMember, GroupUpdate
from agentrl.weights.vllm_parameters import layer_sizes


class Layer(torch.nn.Module):
    """A layer as vLLM has it on a CPU, whose single rows come out otherwise than several."""

    def __init__(self, fewest: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.input_size, self.output_size, self.params_dtype, self.asked = 3, 3, torch.float32, 0
        self.cpu_linear: Any = self.run
        self.fewest = fewest

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.asked += 1
        return x @ weight.T + (0.0 if len(x) >= self.fewest else 1.0)


def test_layers_get_as_many_rows_as_they_need() -> None:
    plans: dict[Any, int] = {}
    model = torch.nn.ModuleList([Layer(2), Layer(2)])
    vllm_backend.make_row_invariant(model, plans)
    assert plans == {(3, 3, torch.float32): 2}
    layer: Any = model[0]
    assert isinstance(layer.cpu_linear, RowInvariantLinear)
    assert torch.equal(layer.cpu_linear(torch.ones(1, 3), layer.weight, None), torch.ones(1, 3))
    other: Any = model[1]
    assert other.asked == 0  # a layer of the same shape is not measured again
    wrapped = layer.cpu_linear
    vllm_backend.make_row_invariant(model, plans)
    assert layer.cpu_linear is wrapped


def test_a_layer_that_needs_nothing_stays_as_it_is() -> None:
    model = torch.nn.ModuleList([Layer(1)])
    vllm_backend.make_row_invariant(model, {})
    layer: Any = model[0]
    assert not isinstance(layer.cpu_linear, RowInvariantLinear)


def test_an_embedding_that_gives_the_logits_is_an_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM before 0.27, where a tied output layer is no layer of its own."""
    made: Any = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(made)
    made.weight, made.embedding_dim, made.num_embeddings_per_partition = torch.nn.Parameter(torch.zeros(8, 4)), 4, 8
    model, renewed = torch.nn.ModuleList([made]), list[Any]()
    monkeypatch.setattr(vllm_backend, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: renewed.append((layer, remove_weight)))
    vllm_backend.repack_lm_heads(model)
    assert not renewed  # it only looks tokens up
    made.cpu_linear = torch.nn.functional.linear
    vllm_backend.repack_lm_heads(model)
    assert renewed == [(made, False)]
    assert layer_sizes(made) == (4, 8, torch.float32)


class Model(torch.nn.Module):
    """A model that takes tensors of its own names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in tensors:
            getattr(self, name).data = tensor
            loaded.add(name)
        return loaded


def transfer(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A transfer by shared memory whose steps are noted."""
    steps: list[str] = []
    monkeypatch.setattr(vllm_backend, "initialize_layerwise_reload", lambda model: steps.append("begin"))
    monkeypatch.setattr(vllm_backend, "finalize_layerwise_reload", lambda model, config: steps.append("end"))
    monkeypatch.setattr(vllm_backend, "repack_lm_heads", lambda model: steps.append("repack"))
    monkeypatch.setattr(vllm_backend, "make_row_invariant", lambda model, plans: steps.append("rows"))
    made: Any = vllm_backend.SharedMemoryTransfer.__new__(vllm_backend.SharedMemoryTransfer)
    made.model, made.model_config, made.device = Model(), None, torch.device("cpu")
    made._row_plans, made._expected = None, set()
    return made, steps


def test_all_parameters_of_a_file_are_loaded_and_stale_copies_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, steps = transfer(monkeypatch)
    made.make_row_invariant()
    save_file({"a": torch.ones(2), "b": torch.full((2,), 2.0)}, tmp_path / "whole")
    made.start_weight_update()
    made.receive_weights(vllm_backend.SharedMemoryUpdate(path=str(tmp_path / "whole")))
    made.finish_weight_update()
    assert steps == ["rows", "begin", "end", "repack", "rows"]
    assert (made.model.a.tolist(), made.model.b.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_file_that_lacks_a_parameter_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, steps = transfer(monkeypatch)
    save_file({"a": torch.ones(2)}, tmp_path / "part")
    made.start_weight_update()
    with pytest.raises(ValueError, match="lacks values for 1 parameters, for example b"):
        made.receive_weights(vllm_backend.SharedMemoryUpdate(path=str(tmp_path / "part")))
    made.finish_weight_update()
    assert steps == ["begin", "end", "repack"]


def test_a_worker_passes_on_why_a_transfer_failed() -> None:
    worker: Any = vllm_backend.WorkerExtension()
    worker.weight_transfer_engine = SimpleNamespace(outcome=lambda: "why", make_row_invariant=lambda: None)
    assert worker.weights_outcome() == "why"
    worker.make_row_invariant()


def test_what_a_sender_describes_is_what_an_engine_expects() -> None:
    infos = [TensorInfo("a", torch.bfloat16, (2, 3)), TensorInfo("b", torch.int32, ())]
    assert list(GroupUpdate(**as_vllm_reads(infos)).infos()) == infos
    assert [info.nbytes for info in infos] == [12, 4]


@pytest.mark.parametrize(("paired", "place", "rank", "size"), [(False, ("first", 1), 6, 9), (True, ("own", 2), 1, 2)])
def test_a_worker_joins_at_its_place(paired: bool, place: tuple[str, int], rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three workers before this engine and its own number 2: the sixth of nine members over NCCL, alone with a learner rank over IPC."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vllm_groups, "join", lambda *given: asked.append(given[:4]))
    member = GroupMember(lambda *_: None, torch.device("cpu"), paired=paired)  # type: ignore[arg-type, return-value]
    info = GroupInit(places={"0": ("first", 1), "5": ("own", 2)}, bucket_bytes=8, timeout_s=1.0, before=3, size=8)
    member.join(info, 2)
    assert asked == [(*place, rank, size)]


def test_a_group_that_does_not_come_about_is_the_reason_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise TransferAbandonedError("nobody there")

    monkeypatch.setattr(vllm_groups, "join", refused)
    member = GroupMember(lambda *_: None, torch.device("cpu"), paired=False)  # type: ignore[arg-type, return-value]
    info = GroupInit(places={"0": ("first", 1)}, bucket_bytes=8, timeout_s=1.0, before=0, size=1)
    member.join(info, 0)
    assert member.reason == "nobody there"
    member.receive(GroupUpdate(names=[], dtype_names=[], shapes=[]), lambda tensors: None)
    assert member.reason == "nobody there"
    monkeypatch.setattr(vllm_groups, "join", lambda *_: SimpleNamespace(close=lambda: None))
    member.join(info, 0)
    assert member.reason == ""


class Store(dict[str, str]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> Any:  # type: ignore[override]
        return self[key].encode()


class Mapped:
    """Buffers of this process, by their number."""

    def __init__(self) -> None:
        self.shared: list[Tensor] = []

    def allocate(self, size: int, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def share(self, buffer: Tensor) -> str:
        self.shared.append(buffer)
        return str(len(self.shared) - 1)

    def open(self, handle: str, device: torch.device) -> Tensor:
        return self.shared[int(handle)]


def test_a_bucket_is_the_part_of_the_buffer_that_is_told() -> None:
    store, handles, cpu = Store(), Mapped(), torch.device("cpu")
    first, second = (SharedBuffers(store, rank, cpu, handles) for rank in (0, 1))
    buffer = first.buffer(8, cpu)
    buffer.copy_(torch.arange(8))
    for number, (start, end) in enumerate([(2, 5), (5, 8)]):
        first.begin(buffer[start:end])
        into = torch.zeros(3, dtype=torch.uint8)
        second.begin(into)()
        assert into.tolist() == list(range(start, end))
        assert store[f"read/{number}"] == "yes"
    assert len(handles.shared) == 1  # one buffer is shared once
    first.end()
    first.begin(buffer[:3])
    assert len(handles.shared) == 2  # in another transfer anew
    with pytest.raises(ValueError, match="a bucket of 3 bytes came where 4"):
        second.begin(torch.zeros(4, dtype=torch.uint8))()
    second.abort()
    second.begin(torch.zeros(4, dtype=torch.uint8))()  # waits no more


def test_a_number_begins_at_a_multiple_of_its_size() -> None:
    """Behind a single number of 2 bytes, one of 4 bytes is copied to a place of its own."""
    sent = [
        ("a", torch.tensor([2.5], dtype=torch.bfloat16)),
        ("b", torch.tensor([3.25, -1.0])),
        ("c", torch.tensor([7], dtype=torch.int64)),
    ]
    buffer = torch.cat([tensor.view(torch.uint8) for _, tensor in sent])
    found: dict[str, Tensor] = {}
    _take(describe(sent), buffer, lambda: None, found.update)
    assert all(torch.equal(found[name], tensor) for name, tensor in sent)


def test_a_rank_sends_to_all_workers_or_to_the_one_on_its_gpu() -> None:
    def others(kind: Any, rank: int, *engines: str) -> int:
        sender = GroupSender(kind, workers=2, rank=rank)
        try:
            return sender._others(Membership(1, engines))
        finally:
            sender.close()

    assert [others("nccl", rank, "engine-0", "engine-1") for rank in (0, 1)] == [4, 0]
    assert [others("ipc", rank, "engine-1") for rank in (0, 1, 2, 3)] == [0, 0, 1, 1]
