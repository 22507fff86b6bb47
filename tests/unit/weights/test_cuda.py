"""What of the GPU senders needs no GPU."""

import threading
from collections.abc import Iterator

import pytest
import torch

from agentrl.core.errors import WeightSyncError
from agentrl.weights.cuda import NcclSender, NotingClient


class RecordedSender(NcclSender):
    """Copies out what would be broadcast, when told to."""

    def __init__(self) -> None:
        super().__init__(engine_ranks=3)
        self.go = threading.Event()
        self.sent: list[dict[str, torch.Tensor]] = []
        self.failure: Exception | None = None

    def _broadcast(self) -> None:
        assert self.go.wait(10)
        if self.failure:
            raise self.failure
        self.sent.append({name: tensor.clone() for name, tensor in self._snapshot.tensors})


@pytest.fixture
def sender() -> Iterator[RecordedSender]:
    sender = RecordedSender()
    yield sender
    sender.go.set()
    sender.close()


def test_nccl_update_says_where_to_meet_and_what_comes(sender: RecordedSender) -> None:
    update = sender.send([("a", torch.zeros(2, 3)), ("b", torch.zeros(4, dtype=torch.bfloat16))], 5)
    assert update.payload["update"] == {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    connect = update.payload["connect"]
    assert connect["world_size"] == 4
    assert connect["master_address"] == "127.0.0.1"
    assert connect["master_port"] > 0


def test_nccl_sends_a_copy_while_the_learner_goes_on(sender: RecordedSender) -> None:
    weight = torch.ones(3)
    sender.send([("a", weight)], 1)
    weight.zero_()  # the next optimizer step
    sender.go.set()
    sender.send([("a", weight)], 2)
    assert torch.equal(sender.sent[0]["a"], torch.ones(3))


def test_a_broadcast_that_failed_is_reported_by_the_next_send(sender: RecordedSender) -> None:
    sender.failure = RuntimeError("NCCL said no")
    sender.go.set()
    sender.send([("a", torch.zeros(1))], 1)
    with pytest.raises(WeightSyncError, match="NCCL said no"):
        sender.send([("a", torch.zeros(1))], 2)


def test_a_broadcast_that_no_engine_joins_ends_in_an_error(sender: RecordedSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.weights.cuda.TRANSFER_TIMEOUT_S", 0.05)
    sender.send([("a", torch.zeros(1))], 1)
    with pytest.raises(WeightSyncError, match="did not take"):
        sender.send([("a", torch.zeros(1))], 2)


def test_the_client_keeps_what_engines_have_to_be_told() -> None:
    client = NotingClient()
    client.init_weight_transfer_engine({"packed": False})
    client.start_weight_update()
    client.update_weights({"names": ["a"]})
    client.finish_weight_update()
    assert client.update == {"names": ["a"]}
