"""The alarm: a learner or an engine with a planted error is stopped at its first step, a healthy run is not."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.assets import tiny_model_path
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import MismatchError, WeightsDifferError
from agentrl.core.settings import flag
from agentrl.learner.alarm import CAUSES, Comparison, MismatchAlarm
from agentrl.resolve.parts import mismatch_limit

ENV = str(Path(__file__).parents[3] / "envs" / "arithmetic.py")
SMALL: dict[str, Any] = {
    "num_steps": 1,
    "groups_per_step": 4,
    "n_samples_per_prompt": 4,
    "max_new_tokens": 8,
    "runtime": "local",
    "engine": "transformers",
    "skip_checks": ("env",),
    "tensorboard": False,
    "save_model": False,
}
SIDES = Comparison(model="Some", learner_dtype="float32", kernel="sdpa", layout="rows padded", engine="vllm in bfloat16")


def run(folder: Path, **settings: Any) -> agentrl.Run:
    return agentrl.train(ENV, run_dir=folder / "run", **{**SMALL, **settings})


def plant(monkeypatch: pytest.MonkeyPatch, error: Callable[[Any], None]) -> None:
    """Have the learner's policy loaded with an error."""
    from agentrl.learner import state

    load = state.load_model

    def loaded(*args: Any, **named: Any) -> Any:
        model = load(*args, **named)
        error(model)
        return model

    monkeypatch.setattr(state, "load_model", loaded)


def gemma(folder: Path) -> str:
    """A random Gemma-2 whose scores are far beyond its soft cap, with the tokenizer of the bundled model."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    caps = {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1, "final_logit_softcapping": 30.0}
    config = Gemma2Config(**sizes, **caps, vocab_size=512, head_dim=16, initializer_range=0.3, max_position_embeddings=1024, eos_token_id=1)
    Gemma2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tiny_model_path() / name, folder)
    return str(folder)


def test_dropout_that_stays_on_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def drop(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, output: torch.nn.functional.dropout(output, 0.5))

    plant(monkeypatch, drop)
    monkeypatch.setattr("agentrl.learner.state.check_repeatable", lambda *_: None)
    with pytest.raises(MismatchError, match=r"step 1: .*LlamaForCausalLM in float32, attention sdpa, rows padded.*transformers in float32"):
        run(tmp_path)


@pytest.mark.slow
def test_attention_without_the_soft_cap_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.learner.kernels.Proof.problem", lambda *_, **__: "")
    model = gemma(tmp_path / "gemma")
    with pytest.raises(MismatchError, match=r"(?s)step 1: .*Gemma2ForCausalLM.*--attn-implementation eager"):
        run(tmp_path, model=model, attn_implementation="sdpa")
    healthy = agentrl.train(ENV, run_dir=tmp_path / "healthy", **SMALL, model=model, attn_implementation="eager")
    assert healthy.metrics[0]["mismatch/mean"] < 1e-5


def test_a_wrong_rope_factor_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda model: model.model.rotary_emb.inv_freq.mul_(0.5))
    with pytest.raises(MismatchError, match=r"(?s)the weights that both loaded.*RoPE factors"):
        run(tmp_path)


def test_an_engine_with_other_weights_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.engine.slot_model import SlotModel

    monkeypatch.setattr(SlotModel, "load", lambda model, path: None)  # it says that it has the weights of the new version
    with pytest.raises(MismatchError, match=r"step 2: .*the published weights of version 1"):
        run(tmp_path / "alarm", num_steps=3, learning_rate=5e-3, verify_weights_every=0)
    with pytest.raises(WeightsDifferError, match="38 of 38 tensors of its weights are not the learner's"):
        run(tmp_path / "digests", num_steps=3, learning_rate=5e-3)


def test_healthy_runs_go_on(tmp_path: Path) -> None:
    for name, settings in {"sync": {}, "async": {"asynchronous": True}, "bf16": {"engine_dtype": "bfloat16"}}.items():
        healthy = agentrl.train(ENV, run_dir=tmp_path / name, **{**SMALL, "num_steps": 2}, audit_every=1, **settings)
        assert healthy.summary["warnings"] == []
        assert len(healthy.metrics) == 2
        for row in healthy.metrics:
            assert (row.get("mismatch/mean") or 0.0) < (0.02 if name == "bf16" else 1e-5)
            assert row["audit/logprob_error_max"] < 1e-5
            assert row["audit/gradient_angle"] < 0.01


def judged(alarm: MismatchAlarm, step: int, mean: float | None) -> str:
    """Return what the alarm says of a step."""
    metrics = {} if mean is None else {"mismatch/mean": mean, "mismatch/max": 2 * mean}
    try:
        alarm.judge(step, metrics, 7)
    except MismatchError as error:
        return str(error)
    return ""


def test_the_first_weights_and_the_first_published_ones_are_judged_once() -> None:
    alarm = MismatchAlarm(0.1, SIDES)
    assert not judged(alarm, 0, 0.1)
    assert not judged(alarm, 1, None)  # no token of the newest weights, in an asynchronous run
    assert "published weights of version 2" in judged(alarm, 2, 0.2)
    assert not judged(alarm, 3, 0.2)


def test_the_message_says_what_was_compared() -> None:
    said = judged(MismatchAlarm(0.1, SIDES), 0, 0.25)
    assert "7 sampled tokens differ by 0.25 nats on average and 0.5 at most, and the limit is 0.1 on average (--max-mismatch)" in said
    assert "the learner (Some in float32, attention sdpa, rows padded) and the engine (vllm in bfloat16)" in said
    causes = ("Dropout", "soft cap", "RoPE", "other weights", "data types")
    places = [said.index(cause) for cause in causes]
    assert places == sorted(places)


def test_flags_that_the_message_names_exist() -> None:
    named = set(re.findall(r"--[a-z0-9-]+", CAUSES))
    assert len(named) > 8
    assert named <= {flag(name) for name in settings_of(TrainConfig)}


def test_without_a_limit_nothing_is_judged() -> None:
    assert not judged(MismatchAlarm(None, SIDES), 0, 5.0)


def test_what_is_no_number_is_left_to_the_check_of_gradients() -> None:
    assert not judged(MismatchAlarm(0.1, SIDES), 0, math.nan)
    assert judged(MismatchAlarm(0.1, SIDES), 0, math.inf)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 0.01),
        ({"engine_dtype": "bfloat16"}, 0.1),
        ({"learner_dtype": "bfloat16"}, 0.1),
        ({"engine_args": ["quantization=fp8"], "engine": "vllm"}, 0.1),
        ({"lora_rank": 4, "lora_dropout": 0.1}, 0.1),
        ({"asynchronous": True, "kv_on_publish": "keep"}, 0.1),
        ({"max_mismatch": 0.3}, 0.3),
        ({"max_mismatch": 0}, None),
        ({"max_mismatch": "none"}, None),
        ({"off_policy": "none", "top_p": 0.9}, None),
        ({"off_policy": "none", "top_k": 20}, None),
    ],
)
def test_the_limit_follows_the_data_types_and_truncated_sampling_has_none(changes: dict[str, Any], limit: float | None) -> None:
    assert mismatch_limit(agentrl.settings(ENV, **changes), "cpu") == limit
