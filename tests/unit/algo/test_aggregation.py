import pytest
import torch

from agentrl.algo.token_losses import AGGREGATIONS, Denominators, aggregate
from agentrl.core.errors import ConfigError

LOSS = torch.tensor([1.0, 2.0, 3.0, 10.0])
LENGTH = torch.tensor([3, 3, 3, 1])
SIZES = Denominators(tokens=4, episodes=2, constant=5.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("seq-mean-token-mean", (2.0 + 10.0) / 2),
        ("seq-mean-token-sum", (6.0 + 10.0) / 2),
        ("constant", 16.0 / (2 * 5)),
    ],
)
def test_definitions(mode: str, expected: float) -> None:
    assert float(aggregate(LOSS, episode_length=LENGTH, mode=mode, denominators=SIZES)) == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_micro_batch_contributes_nothing_but_can_be_differentiated(mode: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss = aggregate(empty, episode_length=LENGTH[:0], mode=mode, denominators=SIZES)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match=r"--loss-aggregation = 'mean'.*token-mean"):
        aggregate(LOSS, episode_length=LENGTH, mode="mean", denominators=SIZES)
