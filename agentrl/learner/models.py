"""The models of a learner: loading them, and what the policy and the critic make of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.core.errors import ConfigError, LearnerError
from agentrl.learner.layout import MicroBatch
from agentrl.learner.settings import LearnerSettings


def load_model(settings: LearnerSettings, ds_config: dict[str, Any], *, trained: bool) -> Any:
    """A causal language model in the learner's data type, with dropout switched off, so that every forward pass gives the same numbers.

    With ZeRO-3 in `ds_config` every rank keeps only its part while loading; the activations of a trained model are recomputed in the
    backward pass if asked.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, settings, ds_config, trained=trained)


def load_value_backbone(settings: LearnerSettings, ds_config: dict[str, Any]) -> Any:
    """The model without its output layer, to be trained as a critic; arguments as in `load_model`."""
    from transformers import AutoModel

    return _load(AutoModel, settings, ds_config, trained=True)


def _load(factory: Any, settings: LearnerSettings, ds_config: dict[str, Any], *, trained: bool) -> Any:
    with _partitioned_loading(ds_config), quiet_transformers():
        model = factory.from_pretrained(
            settings.model,
            dtype=torch.bfloat16 if settings.bf16 else torch.float32,
            attn_implementation=settings.learner.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
        )
    disable_dropout(model)
    if trained and settings.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, in modules and in the functional calls that read it from attributes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@contextmanager
def _partitioned_loading(ds_config: dict[str, Any]) -> Iterator[None]:
    """Tell transformers to partition weights while loading them, if ZeRO-3 is used."""
    if ds_config["zero_optimization"]["stage"] < 3:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    keep_alive = HfDeepSpeedConfig(ds_config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and notes about weights that are not used out of the learner's output."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


CHUNK_ELEMENTS = 2**26
"""Entries of the float32 log-softmax held at once; further chunks are recomputed in the backward pass."""


class PolicyModel(nn.Module):
    """A causal language model whose forward pass ends in log-probabilities instead of logits.

    Only the positions that predict an action token go through the output layer, which for a long prompt and a large
    vocabulary is most of the memory of a step. Whatever the model does to its logits afterwards (a scale, a soft cap)
    still happens, because only the input of the output layer is narrowed.
    """

    model: Any

    def __init__(self, model: nn.Module, *, entropy_gradient: bool = False, routing: bool = False) -> None:
        super().__init__()
        self.model = model
        self.entropy_gradient, self.routing = entropy_gradient, routing
        if self.model.get_output_embeddings() is None:
            raise LearnerError(
                f"{type(model).__name__} has no output embedding layer, so it is not a causal language model that can be trained"
            )

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Score the action tokens of a micro-batch.

        Returns:
            Log-probabilities of the tempered distribution # [a], its entropies in nats # [a], and the load of the
            experts as `routing_load` gives it, or nothing # [2, experts]; all float32.
        """
        wanted = {"output_router_logits": True} if self.routing else {}
        with _only_positions(self.model.get_output_embeddings(), micro.select):
            output = self.model(**micro.inputs(), use_cache=False, **wanted)
        scores = self._score(output.logits[0], micro.targets, micro.temperature)
        if not self.routing:
            return *scores, scores[0].new_zeros(2, 0)
        return *scores, routing_load(output.router_logits, micro.real, experts_per_token(self.model))

    def _score(self, logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
        if len(logits) <= rows:
            return token_scores(logits, targets, temperature, self.entropy_gradient)
        parts = [
            checkpoint(token_scores, *chunk, self.entropy_gradient, use_reentrant=False)
            for chunk in zip(*(torch.split(part, rows) for part in (logits, targets, temperature)), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def experts_per_token(model: Any) -> int:
    """Experts that each token is sent to.

    Raises:
        ConfigError: If the model is not a mixture of experts.
    """
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if top_k is None:
        name = type(model).__name__
        raise ConfigError("--aux-loss-coef", "above 0", f"{name} is not a mixture of experts with a router to balance", "Leave it at 0.")
    return int(top_k)


def token_scores(logits: Tensor, targets: Tensor, temperature: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `targets` # [a] and entropies in nats # [a] of logits # [a, vocabulary] at a temperature each # [a]."""
    log_p = torch.log_softmax(logits.float() / temperature[:, None], dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


@contextmanager
def _only_positions(head: nn.Module, select: Tensor) -> Iterator[None]:
    """Within the block, the output layer sees the selected positions only, as one row of a batch of one."""

    def narrow(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[select][None], *inputs[1:])

    handle = head.register_forward_pre_hook(narrow)
    try:
        yield
    finally:
        handle.remove()


def routing_load(router_logits: Sequence[Tensor], real: Tensor, top_k: int) -> Tensor:
    """Return how often each expert was chosen, and the sum of its probabilities, for one micro-batch and all layers. # [2, experts].

    The latter has a gradient. `router_logits` has one tensor [B * L, experts] per layer; `real` [B * L] is False for padding.
    """
    probabilities = torch.cat([logits[real] for logits in router_logits]).float().softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
    counts = torch.bincount(chosen, minlength=probabilities.shape[-1])
    return torch.stack([counts.to(probabilities.dtype), probabilities.sum(0)])


def balance_share(probability: Tensor, chosen: Tensor, top_k: int) -> Tensor:
    """Return the share of this micro-batch in the load-balancing loss of an update (Switch Transformers, arXiv:2101.03961).

    ``experts * sum_e f_e P_e`` with f_e the share of tokens sent to expert e and P_e its mean probability, over all
    layers and tokens of the update. Only P_e has a gradient, so with f_e known the loss is a sum over tokens.

    Args:
        probability: Sum of each expert's probabilities in this micro-batch. # [experts]
        chosen: How often each expert was chosen in the whole update. # [experts]
        top_k: Experts per token.

    Returns:
        A scalar; the sum over micro-batches and ranks is the loss.
    """
    entries = chosen.sum() / top_k
    return len(chosen) * (chosen / entries * probability / entries).sum()


class ValueModel(nn.Module):
    """Value of the state in which each action token is about to be sampled.

    The new output layer starts at 0, so that the first values are 0 whatever the seed.
    """

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(self.model.config.get_text_config().hidden_size, 1, bias=False, dtype=self.model.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values of the action tokens of a micro-batch. # [a] float32."""
        hidden: Tensor = self.model(**micro.inputs(), use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[micro.select])[:, 0]
        return values.to(torch.float32)
