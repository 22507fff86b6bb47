"""Prompts computed together: each has the logits, keys and values, bit for bit, that it has alone, and the logits of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence as Several
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Sampling, ints
from agentrl.engine.prefill import Prefill
from agentrl.engine.sequences import Sequence, Slot, SlotTable
from agentrl.engine.slot_model import SlotModel
from agentrl.engine.slots import SlotCache
from tests.e2e.vllm_support import prompt, random_llama, saved, settings

SLOTS, CAPACITY = 24, 256


def random_gemma() -> Any:
    """A model with windows of attention and soft caps of scores and logits."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=16,
        attn_implementation="eager",  # the one that has soft caps
        initializer_range=0.2,
    )
    return Gemma2ForCausalLM(config).float().eval()


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SlotModel, Any]:
    made = random_llama() if request.param == "llama" else random_gemma()
    folder: Path = tmp_path_factory.mktemp("model")
    return SlotModel(settings(saved(made, folder))), made


def sequence(ids: Several[int], session: str = "", sampled: Several[int] = ()) -> Sequence:
    wanted = GenerationRequest(request_id="r", prompt_ids=ints(list(ids)), sampling=Sampling(), session=session)
    return Sequence(wanted, Future(), [*ids, *sampled], 8, frozenset(), np.random.Generator(np.random.Philox(key=0)))


def held(model: SlotModel, each: Sequence) -> list[Tensor]:
    """Keys and values of a sequence."""
    return [stored[each.slot, :, : len(each.ids)].clone() for pair in model.cache._layers.values() for stored in pair]


def computed(
    model: SlotModel, calls: Several[Several[Sequence]], slots: int = SLOTS, capacity: int = CAPACITY
) -> list[tuple[Tensor, list[Tensor]]]:
    """What each sequence got, when those of each call are computed together in a cache that is empty at first."""
    model.cache, table, found = SlotCache(slots, capacity), SlotTable(slots), []
    with torch.inference_mode():
        for call in calls:
            logits = Prefill(model, table).run(list(call))
            found += [(row.clone(), held(model, each)) for row, each in zip(logits, call, strict=True)]
            for each in call:
                table.release(each.slot)
    return found


def same(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_company_changes_no_bit(pair: tuple[SlotModel, Any], seed: int) -> None:
    model, _ = pair
    choice = random.Random(seed)
    prompts = [prompt(100 * seed + k, choice.choice((1, 2, 7, 8, 11, 12, 17, 31, 60, 64, 65, 130))) for k in range(16)]
    prompts += [prompts[choice.randrange(16)] for _ in range(6)]
    alone = [computed(model, [[sequence(ids)]])[0] for ids in prompts]
    together = computed(model, [[sequence(ids) for ids in prompts]])
    assert [same(*each) for each in zip(alone, together, strict=True)] == [True] * len(prompts)


def test_the_logits_are_those_of_transformers(pair: tuple[SlotModel, Any]) -> None:
    model, made = pair
    prompts = [prompt(k, 3 + 5 * k) for k in range(12)]
    with torch.no_grad():
        expected = torch.stack([made(torch.tensor([ids])).logits[0, -1] for ids in prompts])
    found = torch.stack([logits for logits, _ in computed(model, [[sequence(ids) for ids in prompts]])])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_sessions_branch_and_grow_together(pair: tuple[SlotModel, Any]) -> None:
    """Two branches of one session, in one call with its beginning and with another session, then both longer."""
    model, _ = pair
    stem, other = prompt(1, 40), prompt(2, 21)
    branches = [[*stem, *prompt(3, 9)], [*stem, *prompt(4, 30)]]
    longer = [[*branch, *prompt(5, 4)] for branch in branches]
    calls = [
        [sequence(stem, "a"), sequence(other, "b"), *(sequence(branch, "a") for branch in branches)],
        [*(sequence(ids, "a") for ids in longer), sequence([*other, 9, 9], "b")],
    ]
    found = computed(model, calls)
    alone = [computed(model, [[sequence(each.ids)]])[0] for call in calls for each in call]
    assert [same(*each) for each in zip(alone, found, strict=True)] == [True] * 7
    assert [each.cached for call in calls for each in call] == [0, 0, 40, 40, 49, 70, 21]


def test_a_slot_that_was_taken_for_another_prompt_is_not_found_by_its_old_one(pair: tuple[SlotModel, Any]) -> None:
    model, _ = pair
    calls = [[sequence(prompt(k, 20))] for k in (1, 2, 3, 1)]
    first, _, _, again = computed(model, calls, slots=2)
    assert same(first, again)
    assert [call[0].cached for call in calls] == [0, 0, 0, 0]


def test_a_beginning_of_what_a_session_holds_is_computed_from_its_last_token(pair: tuple[SlotModel, Any]) -> None:
    model, _ = pair
    calls = [[sequence(prompt(1, 40), "a")], [sequence(prompt(1, 40)[:30], "a")]]
    assert same(computed(model, calls)[1], computed(model, [[sequence(prompt(1, 40)[:30])]])[0])
    assert calls[1][0].cached == 29


def test_company_with_more_new_tokens_does_not_write_beyond_a_full_slot(pair: tuple[SlotModel, Any]) -> None:
    model, _ = pair
    held_by, other = prompt(1, 60), prompt(2, 14)
    calls = [[sequence(held_by, "a")], [sequence([*held_by, 5, 6, 7], "a"), sequence(other)]]
    found = computed(model, calls, capacity=64)
    assert same(found[1], computed(model, [[sequence([*held_by, 5, 6, 7])]])[0])
    assert same(found[2], computed(model, [[sequence(other)]])[0])


def test_what_was_sampled_before_new_weights_is_computed_with_its_prompt(pair: tuple[SlotModel, Any]) -> None:
    model, _ = pair
    ids, sampled = prompt(1, 20), prompt(2, 13)
    calls = [[sequence(ids, sampled=sampled), sequence(ids), sequence([*ids, *sampled])]]
    first, prefix, whole = computed(model, calls)
    assert same(first, whole)
    assert same(prefix, computed(model, [[sequence(ids)]])[0])
    assert calls[0][0].cached == 0


def test_slots_are_taken_in_the_order_in_which_they_became_free() -> None:
    table = SlotTable(3)
    taken = [table.take(None, None) for _ in range(3)]
    assert (taken, table.free) == ([0, 1, 2], 0)
    for index in (1, 0, 2):
        table.release(index)
    assert [table.take(2, None), table.take(None, 1), table.take(None, 1)] == [2, 0, 1]


def test_a_smaller_table_keeps_what_is_used_and_then_what_was_free_for_the_shortest_time() -> None:
    table, owners = SlotTable(4), [sequence([k, k]) for k in range(4)]
    for index, owner in enumerate(owners):
        owner.slot = table.take(None, None)
        table.fill(index, Slot([index, index], prompt=bytes([index]), owner=owner))
    table.release(0)
    table.release(3)
    three, moves = table.resized(3)
    assert moves == {1: 0, 2: 1, 3: 2}
    assert [owners[1].slot, owners[2].slot, three.with_prompt(b"\x03"), three.with_prompt(b"\x00")] == [0, 1, 2, None]
    assert three.free == 1
    one, moves = three.resized(1)
    assert (moves, owners[1].slot, owners[2].slot, one.free) == ({0: 0}, 0, -1, 0)
