"""A copy with changed fields is what `dataclasses.replace` makes."""

from __future__ import annotations

from dataclasses import fields, replace

from agentrl.core.altered import altered
from agentrl.core.types import FinishReason, Turn, floats, ints


def test_a_copy_has_the_changes_and_everything_else() -> None:
    turn = Turn(
        prompt_ids=ints([1]), token_ids=ints([2]), logprobs=floats([-0.5]), versions=ints([3]), finish_reason=FinishReason.STOP, text="b"
    )
    changes = {"reward": 0.5, "info": {"a": 1.0}, "state_key": "home"}
    copy, expected = altered(turn, **changes), replace(turn, **changes)
    assert type(copy) is Turn
    assert all(getattr(copy, field.name) is getattr(expected, field.name) for field in fields(Turn) if field.name != "reward_parts")
    assert copy.reward_parts is turn.reward_parts
    assert (turn.reward, turn.state_key) == (0.0, None)
