"""Models of real families, tiny and random: trained as one row at a time through their own attention, or refused by name."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from agentrl.core.errors import ConfigError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Group, Sampling, Status, Task, Trajectory, Turn, floats, ints
from agentrl.engine.plan import EngineConfig
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transformers_engine import TransformersEngine
from agentrl.learner import kernels
from agentrl.learner.attention import KERNELS
from agentrl.learner.batch import collate
from agentrl.learner.dropout import disable_dropout
from agentrl.learner.layout import Layout
from agentrl.learner.learner import LearnerRank
from agentrl.learner.models import load_model
from agentrl.learner.settings import LearnerSettings
from agentrl.learner.trees import one_row_bundles, share_prefixes
from agentrl.rollout.plan import ModelConfig
from agentrl.weights.rope import fix_rope
from agentrl.weights.twin import build_twin, twin_config
from tests.learner_support import VOCABULARY, CollectingSender, gradients, make_settings, row_scores, write_tokenizer

NATS = 1e-4
RELATIVE = 1e-3
CONTEXT = 128

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0 + n for n in range(8)]}
LONG |= {"original_max_position_embeddings": 24}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "SeedOSS": ("SeedOss", {"residual_dropout": 0.2, "attention_dropout": 0.2}),
    "StarCoder2": ("Starcoder2", {"residual_dropout": 0.2, "embedding_dropout": 0.2, "sliding_window": None}),
    "PhiMoE": ("Phimoe", EXPERTS | {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1}),
    "Phi-3 LongRoPE": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 24}),
    "Gemma-2": ("Gemma2", WINDOWS | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
    "VaultGemma": ("VaultGemma", WINDOWS | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 16}),
    "GPT-OSS": ("GptOss", WINDOWS | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "Llama-4": (
        "Llama4Text",
        EXPERTS
        | {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
        | {"intermediate_size_mlp": 48, "num_experts_per_tok": 1},
    ),
    "Falcon-H1": ("FalconH1", MAMBA),
    "RecurrentGemma": (
        "RecurrentGemma",
        {"lru_width": 64, "attention_window_size": 8, "num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "MiMo-V2": (
        "MiMoV2Flash",
        EXPERTS
        | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"], "v_head_dim": 16, "swa_v_head_dim": 16}
        | {"swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "moe_intermediate_size": 16}
        | {"n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"]},
    ),
    "Mamba-2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}),
}
NO_SLOTS = ("Falcon-H1", "RecurrentGemma", "Mamba-2")
"""Families that keep another state than keys and values, which the engine of transformers does not."""


def write(path: Path, family: str) -> str:
    import transformers

    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE | own)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.15)
    model.save_pretrained(path)
    write_tokenizer(path)
    return str(path)


def groups(lengths: tuple[tuple[int, int], ...] = ((30, 9), (30, 4), (30, 6), (5, 12))) -> tuple[Group, ...]:
    """Rows of a prompt and an answer, longer than every window and chunk above; prompts of the same length are the same."""
    rng = np.random.default_rng(5)
    prompts = {prompt: rng.integers(2, VOCABULARY, prompt).tolist() for prompt, _ in lengths}
    trajectories = []
    for number, (prompt, answer) in enumerate(lengths):
        turn = Turn(
            prompt_ids=ints(prompts[prompt]),
            token_ids=ints(rng.integers(2, VOCABULARY, answer).tolist()),
            logprobs=floats([-4.0] * answer),
            versions=ints([0] * answer),
            finish_reason=FinishReason.STOP,
        )
        reward = float(number % 2)
        name = str(number)
        trajectories.append(
            Trajectory(trajectory_id=name, episode_id=name, group_id=0, turns=(turn,), status=Status.FINISHED, reward=reward)
        )
    return (Group(group_id=0, task=Task("x"), trajectories=tuple(trajectories)),)


def settings_of(path: str, **learner: Any) -> LearnerSettings:
    return replace(make_settings(path, learner=learner), max_model_len=CONTEXT)


def alone(path: str) -> Any:
    """The model in evaluation with its own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    fix_rope(model, CONTEXT)
    return model


@torch.no_grad()
def alone_scores(path: str) -> Tensor:
    """Log-probabilities of all action tokens, a row at a time."""
    model, found = alone(path), []
    for row in collate(groups()).rows:
        targets = torch.from_numpy(row.tokens[row.action_positions].astype(np.int64))
        found.append(row_scores(model, row).gather(-1, targets[:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def scores(settings: LearnerSettings) -> tuple[Tensor, str]:
    """Log-probabilities of all action tokens in the layout that a learner chooses while it trains, and its kernel."""
    learner = LearnerRank(settings, CollectingSender())
    learner.start(0, 1, 0)
    models, batch = learner._started.models, collate(groups())
    bundles = one_row_bundles(batch)
    if models.share_prompts:
        bundles = share_prefixes(batch, budget=1000, hidden_size=1000)
    micro = Layout(batch).micro_batch(bundles, packed=models.kernel.packed)
    found = torch.zeros(batch.num_actions)
    models.policy.engine.train()
    found[micro.actions] = models.policy(micro)[0]
    learner.close()
    return found, models.kernel.name


def prefer(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Have `auto` begin with the kernel, as it does on a GPU."""
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_: KERNELS[kernel])


@pytest.mark.parametrize("first", ["sdpa", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chosen_layout_trains_as_one_row_at_a_time(family: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model", family)
    expected = gradients(settings_of(path, attn_implementation="eager", micro_batch_tokens=1, share_prompts=False), groups())
    prefer(monkeypatch, first)
    found, kernel = scores(settings_of(path))
    assert (found - alone_scores(path)).abs().max() < NATS
    assert kernel == CHOSEN[first].get(family, first)
    chosen = gradients(settings_of(path, gradient_checkpointing=family in ("SeedOSS", "PhiMoE")), groups())
    assert expected.keys() == chosen.keys()
    whole = torch.cat([tensor.flatten() for tensor in expected.values()])
    rest = torch.cat([chosen[name].flatten() for name in expected]) - whole
    assert whole.norm() > 0
    assert rest.norm() / whole.norm() < RELATIVE


EAGER = {"Gemma-2": "eager", "VaultGemma": "eager", "GPT-OSS": "eager", "MiMo-V2": "eager", "Mamba-2": "eager"}
CHOSEN: dict[str, dict[str, str]] = {
    "sdpa": EAGER,
    "varlen": EAGER | {"Llama-4": "sdpa", "Falcon-H1": "sdpa", "RecurrentGemma": "sdpa"},
}


@pytest.mark.parametrize(
    ("family", "kernel", "reason"),
    [
        ("Gemma-2", "sdpa", "sdpa leaves out the soft cap of attention scores, which Gemma2ForCausalLM asks for"),
        ("Gemma-2", "varlen", "varlen leaves out the soft cap"),
        ("GPT-OSS", "sdpa", "sdpa leaves out attention sinks, which GptOssForCausalLM asks for"),
        ("GPT-OSS", "varlen", "varlen leaves out attention sinks"),
        ("Llama-4", "varlen", "varlen knows no chunks of attention, which Llama4ForCausalLM has"),
        ("Falcon-H1", "varlen", "rows back to back would see each other in FalconH1ForCausalLM"),
        ("Mamba-2", "sdpa", "Mamba2ForCausalLM does not support an attention implementation"),
    ],
)
def test_a_kernel_that_leaves_something_out_is_refused(family: str, kernel: str, reason: str, tmp_path: Path) -> None:
    settings = settings_of(write(tmp_path / "model", family), attn_implementation=kernel)
    with pytest.raises(ConfigError, match=reason) as error:
        gradients(settings, groups())
    assert "--attn-implementation" in str(error.value)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "axk2"])
def test_layers_that_choose_among_the_padding_are_refused_with_every_kernel(kind: str) -> None:
    proof = kernels.Proof(build_twin(twin_config(CONFIG_MAPPING[kind]().get_text_config())).eval(), torch.device("cpu"))
    for kernel in ("eager", "sdpa"):
        assert "depend on the rows beside it" in proof.problem(KERNELS[kernel])


def sampled(path: str) -> tuple[list[int], list[int], Tensor]:
    """Prompt, sampled tokens and their log-probabilities."""
    prompt = groups()[0].trajectories[0].turns[0].prompt_ids
    settings = EngineSettings(model=ModelConfig(model=path), engine=EngineConfig(kv_cache_gib=0.01, max_model_len=CONTEXT))

    async def generate() -> Any:
        engine = TransformersEngine(settings)
        await engine.start()
        try:
            return await engine.generate(GenerationRequest(request_id="one", prompt_ids=prompt, sampling=Sampling(max_tokens=20, seed=2)))
        finally:
            await engine.close()

    generation = asyncio.run(generate())
    return prompt.tolist(), generation.token_ids.tolist(), torch.from_numpy(generation.logprobs.copy())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NO_SLOTS])
def test_the_engine_of_transformers_samples_from_the_same_distribution(family: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", family)
    prompt, tokens, logprobs = sampled(path)
    with torch.no_grad():
        logits = alone(path)(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logprobs - expected).abs().max() < NATS


@pytest.mark.parametrize("family", NO_SLOTS)
def test_the_engine_of_transformers_refuses_other_states_than_keys_and_values(family: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=r"--engine = .transformers.: does not compute the attention of \w+, .* Use --engine vllm"):
        sampled(path)


def test_a_model_that_cannot_recompute_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    config = CTRLConfig(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=1, n_head=4, dff=64)
    CTRLLMHeadModel(config).save_pretrained(tmp_path)
    settings = make_settings(str(tmp_path), learner={"gradient_checkpointing": True})
    with pytest.raises(
        ConfigError, match=r"--gradient-checkpointing = True: CTRLLMHeadModel cannot recompute .* --no-gradient-checkpointing"
    ):
        load_model(settings, trained=True)


class Chance(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


def test_a_module_that_leaves_something_to_chance_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

    path = write(tmp_path / "model", "SeedOSS")
    before: Callable[..., Any] = SeedOssMLP.__init__

    def with_chance(self: Any, config: Any) -> None:
        before(self, config)
        self.act_fn = Chance()

    monkeypatch.setattr(SeedOssMLP, "__init__", with_chance)
    with pytest.raises(ConfigError, match=r"two passes of SeedOssForCausalLM .*: model\.layers\.0\.mlp\.act_fn leaves something to chance"):
        gradients(settings_of(path, attn_implementation="eager"), groups())


@pytest.mark.parametrize("family", ["SeedOSS", "StarCoder2", "PhiMoE"])
def test_activations_are_recomputed_as_in_evaluation(family: str, tmp_path: Path) -> None:
    model, plain = (alone(write(tmp_path / "model", family)) for _ in range(2))
    disable_dropout(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    copied = copy.deepcopy(model).train()
    assert not model.train().model.training
    assert model.model.layers[0].training
    runs: list[bool] = []
    copied.model.layers[0].register_forward_pre_hook(lambda layer, _: runs.append(layer.training))
    ids = torch.arange(2, 40)[None]
    for each in (copied, plain):
        each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert runs == [False, False]
    for (name, parameter), other in zip(copied.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_modules_that_come_later_obey(tmp_path: Path) -> None:
    model = alone(write(tmp_path / "model", "SeedOSS"))
    disable_dropout(model)
    model.later = torch.nn.Dropout(0.5)
    assert model.train().later.training
    assert not model.eval().later.training


def test_long_and_short_factors_follow_the_context_of_the_engines(tmp_path: Path) -> None:
    """As in vLLM: long ones for every position if the context is longer than the model was trained with."""
    path = write(tmp_path / "model", "Phi-3 LongRoPE")
    found = []
    for context in (24, 25):
        model = alone_with(path, context)
        found.append(model.model.rotary_emb.inv_freq)
        assert model.config.rope_parameters["rope_type"] == "longrope"
    assert torch.allclose(found[0], found[1] * torch.tensor(LONG["long_factor"]))


def alone_with(path: str, context: int) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fix_rope(model, context)
    return model


def test_frequencies_that_cannot_be_fixed_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM

    dynamic = LlamaForCausalLM(LlamaConfig(**SHAPE | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}))
    fix_rope(dynamic, 256)
    with pytest.raises(ConfigError, match=r"--max-model-len .* dynamic RoPE .* beyond 256 tokens"):
        fix_rope(LlamaForCausalLM(dynamic.config), 257)
    mscale = {"short_mscale": 1.0, "long_mscale": 1.5}
    config = PhimoeConfig(**SHAPE | EXPERTS | {"rope_parameters": LONG | mscale, "original_max_position_embeddings": 24})
    fix_rope(PhimoeForCausalLM(config), 24)
    with pytest.raises(ConfigError, match="PhimoeRotaryEmbedding depend on the longest text"):
        fix_rope(PhimoeForCausalLM(config), 25)


def test_experts_in_one_tensor_have_no_adapter(tmp_path: Path) -> None:
    path = write(tmp_path / "model", "GPT-OSS")
    for names in ("gate_up_proj", "q_proj,experts", "experts.down_proj"):
        lora = replace(make_settings(path).lora, lora_rank=2, lora_target_modules=names)
        with pytest.raises(ConfigError, match="experts of a layer are one tensor"):
            gradients(replace(settings_of(path), lora=lora), groups())
