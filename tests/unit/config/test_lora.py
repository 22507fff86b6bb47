"""Rules of the settings of adapters."""

from __future__ import annotations

import pytest

from agentrl.core.errors import ConfigError
from agentrl.resolve.commands import load_config

AGENT = ("--agent", "envs/arithmetic.py")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        (("--lora-alpha", "16"), "--lora-alpha", "has no effect without an adapter"),
        (("--lora-dropout", "0.1"), "--lora-dropout", "has no effect without an adapter"),
        (("--lora-target-modules", "q_proj"), "--lora-target-modules", "has no effect without an adapter"),
        (("--lora-rank", "8", "--lora-target-modules", " , "), "--lora-target-modules", "names no layer"),
        (("--lora-rank", "8", "--init-kl-coef", "0.1", "--ref-reset-every", "2"), "--ref-reset-every", "without its adapter"),
        (("--lora-rank", "8", "--lora-dropout", "0.1", "--old-logprobs", "behaviour"), "--lora-dropout", "of the whole adapter"),
        (("--publish", "adapter"), "--publish", "has no effect without an adapter"),
        (("--lora-rank", "8", "--publish", "adapter", "--ray-address", "auto"), "--publish", "other machines"),
        (("--lora-rank", "513", "--publish", "adapter"), "--lora-rank", "above 512"),
        (("--lora-variant", "dora"), "--lora-variant", "has no effect without an adapter"),
        (("--lora-rank", "8", "--lora-variant", "dora", "--publish", "adapter"), "--lora-variant", "vLLM takes none of DoRA"),
        (("--lora-rank", "8", "--lora-variant", "dora", "--zero-stage", "3"), "--zero-stage", "DoRA .* measures whole rows"),
    ],
)
def test_what_an_adapter_excludes_is_refused(words: tuple[str, ...], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config([*AGENT, *words])
    assert error.value.field == field


def test_names_of_other_systems() -> None:
    config = load_config([*AGENT, "--lora-r", "8", "--target_modules", "q_proj,v_proj"])
    assert config.lora.lora_rank == 8
    assert config.lora.target_names == ("q_proj", "v_proj")


def test_4_bits_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*AGENT, "--lora-rank", "8", "--load-in-4bit"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes.*agentrl\[qlora\]"):
        load_config(words)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert load_config(words).learner.load_in_4bit
    for more, field in ((("--zero-stage", "3"), "--zero-stage"), (("--publish", "adapter"), "--publish")):
        with pytest.raises(ConfigError, match="4 bits") as error:
            load_config([*words, *more])
        assert error.value.field == field
