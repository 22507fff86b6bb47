"""Tokens drawn by given numbers: their frequencies, the cuts, and independence of the other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.core.types import Sampling
from agentrl.engine import sampling
from agentrl.engine.sampling import sample

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0])


def drawn(settings: Sampling, count: int = 2000) -> tuple[list[int], list[float]]:
    return sample(LOGITS.repeat(count, 1), [settings] * count, [(index + 0.5) / count for index in range(count)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_and_logprobs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    tokens, logprobs = drawn(Sampling(temperature=temperature))
    expected = torch.log_softmax(LOGITS / temperature, -1)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / len(tokens), expected.exp(), atol=1e-3)
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "left"),
    [(Sampling(top_k=2), {1, 3}), (Sampling(top_p=0.5), {1}), (Sampling(top_p=0.8), {1, 3, 0}), (Sampling(temperature=0.0), {1})],
)
def test_what_is_cut_is_never_drawn_and_the_rest_sums_to_one(settings: Sampling, left: set[int]) -> None:
    tokens, logprobs = drawn(settings)
    assert set(tokens) == left
    if settings.temperature:
        assert sum(np.exp(logprobs[tokens.index(token)]) for token in left) == pytest.approx(1.0, abs=1e-5)


def test_the_largest_number_draws_the_last_token_that_is_possible() -> None:
    logits = torch.tensor([[1.0, 0.0, float("-inf")]])
    assert sample(logits, [Sampling()], [np.nextafter(1.0, 0.0)])[0] == [1]


def test_one_token_is_left_by_the_smallest_cuts() -> None:
    assert set(drawn(Sampling(top_k=1))[0]) == {1}
    even = torch.zeros(3, 1000)
    tokens, logprobs = sample(even, [Sampling(top_p=1e-9)] * 3, [0.0, 0.5, 0.999])
    assert len(set(tokens)) == 1
    assert logprobs == [0.0] * 3


def test_the_smallest_number_passes_over_tokens_without_mass() -> None:
    tokens, logprobs = sample(torch.tensor([[float("-inf"), float("-inf"), 1.0, 0.0]]), [Sampling()], [0.0])
    assert tokens == [2]
    assert logprobs[0] > -1.0


def test_rare_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.full((1, 1001), float(np.log(1e-9)))
    logits[0, 0] = 0.0
    assert sample(logits, [Sampling()], [1.0 - 0.5e-6])[0][0] == pytest.approx(500, abs=3)


def test_a_token_that_is_cut_is_not_drawn_where_the_sum_is_rounded() -> None:
    logits = torch.randn(64, 20_000, generator=torch.Generator().manual_seed(1))
    logits[:, -1] = -50.0
    tokens, logprobs = sample(logits, [Sampling(top_k=19_000)] * 64, [float(np.nextafter(1.0, 0.0))] * 64)
    assert 19_999 not in tokens
    assert np.isfinite(logprobs).all()


def test_a_row_does_not_notice_the_others_nor_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 301, generator=torch.Generator().manual_seed(0)) * 3
    settings = [Sampling(temperature=0.5 + index / 50, top_p=0.9 if index % 3 else 1.0) for index in range(50)]
    draws = np.random.default_rng(0).random(50).tolist()
    together = sample(logits.clone(), settings, draws)
    monkeypatch.setattr(sampling, "CHUNK", 7 * 301)
    assert sample(logits.clone(), settings, draws) == together
    alone = [sample(logits[index : index + 1].clone(), [settings[index]], [draws[index]]) for index in range(50)]
    assert [tokens[0] for tokens, _ in alone] == together[0]
    assert [logprobs[0] for _, logprobs in alone] == together[1]
