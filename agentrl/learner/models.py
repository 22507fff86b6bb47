"""The models of a learner: loading them, and what the policy and the critic make of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from agentrl.core.errors import ConfigError, LearnerError
from agentrl.core.language_models import CLASSES, LABELS
from agentrl.core.model_shape import engine_context, placeholder_ids, text_part
from agentrl.core.tokenizers import quiet_transformers
from agentrl.learner.dropout import disable_dropout
from agentrl.learner.engine import Backend
from agentrl.learner.head import OutputLayer, only_positions, scores_in_chunks, without_tokens
from agentrl.learner.layout import MicroBatch
from agentrl.learner.lora import add_adapter
from agentrl.learner.probes import probe
from agentrl.learner.quantised import quantisation, use_one_product
from agentrl.learner.sequence import SequenceGroup
from agentrl.learner.settings import LearnerSettings
from agentrl.weights.rope import fix_rope
from agentrl.weights.routers import Routers


def load_model(settings: LearnerSettings, backend: Backend | None = None, *, trained: bool) -> Any:
    """A causal language model in the learner's data type, with dropout switched off, so that every forward pass gives the same numbers.

    The back-end may have every rank keep only its part while loading; without one the model is whole. The activations of a trained model
    are recomputed in the backward pass if asked.
    """
    task = settings.objective.task if settings.objective and trained else "CAUSAL_LM"
    kind = CLASSES[task](settings.model, trust_remote_code=settings.trust_remote_code)
    return _load(kind, settings, backend, trained=trained, labels=LABELS.get(task))


def load_value_backbone(settings: LearnerSettings, backend: Backend) -> Any:
    """The model without its output layer, to be trained as a critic; arguments as in `load_model`."""
    from transformers import AutoModel

    return _load(AutoModel, settings, backend, trained=True)


def _load(factory: Any, settings: LearnerSettings, backend: Backend | None, *, trained: bool, labels: int | None = None) -> Any:
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    small = trained and settings.learner.load_in_4bit
    kept_off = "reference" in settings.learner.offload and not trained
    own = nullcontext(True) if backend is None else backend.loading(settings, trained=trained)
    with own as at_once, quiet_transformers():
        model = factory.from_pretrained(
            settings.model,
            dtype=dtype,
            # What the class supports, unless it is to be its own code; `fit_kernel` chooses when the model is there.
            attn_implementation="eager" if settings.learner.attn_implementation == "eager" else None,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            **({"device_map": {"": torch.cuda.current_device()}} if settings.device == "cuda" and at_once and not kept_off else {}),
            **({"quantization_config": quantisation(dtype, HEAD if labels else ())} if small else {}),
            **({"num_labels": labels} if labels else {}),
        )
    if small:
        use_one_product(model)
    disable_dropout(model)
    fix_rope(model, engine_context(model.config, asked=settings.max_model_len, cpu=settings.device == "cpu"))
    if backend is not None and settings.learner.tiled_mlp and not backend.tile_mlps(model):
        name = type(model).__name__
        raise ConfigError("--tiled-mlp", "true", f"{name} has no MLP of one input and one output per layer", "Leave it out.")
    if trained and not settings.learner.train_vision:
        freeze_vision(model)
    if trained and settings.lora.lora_rank:
        task = settings.objective.task if settings.objective else "CAUSAL_LM"
        add_adapter(model, settings.lora, base=settings.model, task=task, head=HEAD if labels else ())
    if trained and settings.learner.compile_layers:
        compile_layers(model)
    if trained and settings.learner.gradient_checkpointing:
        offload = "activations" in settings.learner.offload and settings.device == "cuda"
        if not model.supports_gradient_checkpointing:
            name, remedy = type(model).__name__, "Add --no-gradient-checkpointing."
            raise ConfigError("--gradient-checkpointing", True, f"{name} cannot recompute its activations", remedy)
        model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
    return model


def freeze_vision(model: Any) -> None:
    """Leave what a model sees of pixels as it is; the layers between that and the text are trained."""
    if placeholder_ids(model.config):
        vision = model.get_encoder(modality="image")
        if vision is model.base_model or vision is model:
            raise ConfigError("--no-train-vision", "", f"{type(model).__name__} has no vision part of its own", "Use --train-vision.")
        vision.requires_grad_(False)


def compile_layers(model: nn.Module, *, backend: str = "inductor") -> None:
    """Compile the layers of a transformers model, one like the other, for any number of tokens.

    Raises:
        ConfigError: If the model has no layers that it would also checkpoint one by one.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError("--compile-layers", True, f"{type(model).__name__} has no such layers", "Leave it out.")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


HEAD = ("score",)
"""Layers of reward models that are new: trained whole beside an adapter, and never in 4 bits."""

Comparison: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the logits of a model # [n, vocabulary] and what its teacher gave # [n, ...] to divergences # [n] and figures # [n, m]."""


class PolicyModel(nn.Module):
    """A causal language model whose forward pass ends in log-probabilities instead of logits.

    Only the positions that predict an action token go through the output layer, a chunk at a time and recomputed in the backward
    pass: logits of all of them would be most of the memory of a step. A model whose end is of another form than `OutputLayer` can
    take apart (`whole`) goes through its own forward pass, with its output layer narrowed to those positions.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module,
        *,
        entropy_gradient: bool = False,
        routing: bool = False,
        fp32_head: bool = False,
        samples: bool = True,
        compare: Comparison | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.entropy_gradient, self.routing, self.fp32_head = entropy_gradient, routing, fp32_head
        if self.model.get_output_embeddings() is None:
            raise LearnerError(
                f"{type(model).__name__} has no output embedding layer, so it is not a causal language model that can be trained"
            )
        # Tokens that engines never sample; of given rows the model's own distribution is learned.
        self._excluded = placeholder_ids(self.model.config) if samples else ()
        self._compare = compare
        self._samples = samples
        self._end = OutputLayer(model, self._excluded, samples=samples) if OutputLayer.fits(model) else None
        self.whole = self._end is None
        self.sequence: SequenceGroup | None = None  # ranks to run micro-batches with
        self.routers: Routers | None = None  # of a mixture of experts, to take the experts that the engine took

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits # [n, vocabulary] of what a micro-batch with `hidden` gave. # [n, ...]."""
        return hidden if self._end is None or self.whole else self._end.logits(hidden)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Score the action tokens of a micro-batch.

        Returns:
            Log-probabilities of the tempered distribution # [a] (or more of them: `agentrl.learner.head.token_scores`), its entropies in
            nats # [a] (of given rows the figures of `agentrl.learner.head.given_scores`), and the load of the experts as `routing_load`
            gives it, or nothing # [2, experts]; all float32. With `hidden` the first are what enters the output layer at this rank's
            predictions. # [p, hidden]
        """
        if self.sequence is None:
            new, entropy, load = self._score(micro, micro.inputs())
        else:
            part, inputs, mine = self.sequence.cut(micro)
            new, entropy, load = self._score(part, inputs)
            if self.routing:
                load = self.sequence.sum(load)
            if not micro.hidden:
                new, entropy = self.sequence.gather(new, mine), self.sequence.gather(entropy, mine)
        # Another model's output layer reads hidden states where they were computed.
        return (new, entropy, load) if micro.hidden else (micro.by_action(new), micro.by_action(entropy), load)

    def _score(self, micro: MicroBatch, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        inputs = inputs | {"use_cache": False} | ({"output_router_logits": True} if self.routing else {})
        if self.routers is not None:
            self.routers.forced = micro.experts  # until the next forward pass, since the backward pass may need it
        end = None if self.whole else self._end
        output, new, entropy = self._through_model(micro, inputs) if end is None else self._through_body(micro, inputs, end)
        if not self.routing:
            return new, entropy, new.new_zeros(2, 0)
        return new, entropy, routing_load(output.router_logits, micro.real, experts_per_token(self.model))

    def _through_body(self, micro: MicroBatch, inputs: dict[str, Any], end: OutputLayer) -> tuple[Any, Tensor, Tensor]:
        output = end.body(**inputs)
        hidden = output.last_hidden_state.flatten(0, 1)[micro.select]
        if micro.hidden:
            return output, hidden, hidden.new_zeros(len(hidden))
        gradient, wide, targets, compare = self.entropy_gradient, self.fp32_head, micro.targets, None
        if micro.teacher is not None:
            targets, compare = micro.teacher, self._compare
        rest: Any = {"entropy_gradient": gradient, "wide": wide, "top_k": micro.top_k, "compare": compare}
        return output, *end.score(hidden, targets, micro.temperature, **rest)

    def _through_model(self, micro: MicroBatch, inputs: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
        with only_positions(self.model.get_output_embeddings(), micro.select):
            output = self.model(**inputs)
        logits = without_tokens(output.logits[0], self._excluded)
        if micro.hidden:
            return output, logits, logits.new_zeros(len(logits))
        if micro.teacher is not None and self._compare is not None:
            return output, *self._compare(logits, micro.teacher)
        rest: Any = {"entropy_gradient": self.entropy_gradient, "top_k": micro.top_k, "samples": self._samples}
        return output, *scores_in_chunks(logits, micro.targets, micro.temperature, **rest)


class ReadModel(nn.Module):
    """A model whose outputs are read at the places of a micro-batch."""

    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sequence: SequenceGroup | None = None  # ranks to run micro-batches with

    def outputs(self, micro: MicroBatch) -> Tensor:
        """Return the outputs at the places of a micro-batch. # [a, ...]."""
        if self.sequence is None:
            return micro.by_action(self._read(micro, micro.inputs()))
        part, inputs, mine = self.sequence.cut(micro)
        return micro.by_action(self.sequence.gather(self._read(part, inputs), mine))

    def _read(self, micro: MicroBatch, inputs: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class HeadModel(ReadModel):
    """A reward model or process reward model, whose head is read at the places of a micro-batch."""

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of the head, float32, and no entropies and loads. # [a], or [a, labels] of several; [0], [2, 0]."""
        outputs = self.outputs(micro)
        return outputs, outputs.new_zeros(0), outputs.new_zeros(2, 0)

    def _read(self, micro: MicroBatch, inputs: dict[str, Any]) -> Tensor:
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[micro.select]
        found: Tensor = self.model.score(hidden).float()
        return found[:, 0] if found.shape[1] == 1 else found


@torch.no_grad()
def check_output(policy: PolicyModel, score: Callable[[MicroBatch], tuple[Tensor, ...]], device: torch.device) -> None:
    """Set `whole` of a model whose log-probabilities are others when it is taken apart; tried on the model itself.

    Args:
        policy: The model.
        score: Runs the model on a micro-batch, within the back-end if that holds its parameters.
        device: Where its parameters are.

    Raises:
        ConfigError: If `--fp32-lm-head` is asked for and the model cannot be taken apart.
    """
    fp32_head, policy.fp32_head = policy.fp32_head, False
    if not policy.whole:
        micro = probe(policy.model.config).to(device)
        policy.whole = True
        expected, _, _ = score(micro)
        policy.whole = False
        try:
            found, _, _ = score(micro)
            policy.whole = not torch.allclose(found, expected, rtol=0.0, atol=SAME_OUTPUT)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # a model that needs more for its end says so in one of many ways
            policy.whole = True
    if fp32_head and policy.whole:
        name = type(policy.model).__name__
        raise ConfigError("--fp32-lm-head", "true", f"the output layer of {name} cannot be run apart from the model", "Leave it out.")
    policy.fp32_head = fp32_head


SAME_OUTPUT = 1e-5
"""Difference of log-probabilities that passes for rounding; the same kernels run on the same shapes."""


def experts_per_token(model: Any) -> int:
    """Experts that each token is sent to.

    Raises:
        ConfigError: If the model is not a mixture of experts.
    """
    top_k = text_part(model.config).get("num_experts_per_tok")
    if top_k is None:
        name = type(model).__name__
        raise ConfigError("--aux-loss-coef", "above 0", f"{name} is not a mixture of experts with a router to balance", "Leave it at 0.")
    return int(top_k)


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens that a language model knows."""
    return int(text_part(model.config)["vocab_size"])


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


class _Float32Linear(nn.Linear):
    """A linear layer with products in float32, also of bfloat16 weights: values near 1 would have steps of 0.008."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


class ValueModel(ReadModel):
    """Value of the state in which each action token is about to be sampled.

    The new output layer starts at 0, so that the first values are 0 whatever the seed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.head = _Float32Linear(text_part(self.model.config)["hidden_size"], 1, bias=False, dtype=self.model.dtype)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Values of the action tokens of a micro-batch. # [a] float32."""
        return self.outputs(micro)

    def _read(self, micro: MicroBatch, inputs: dict[str, Any]) -> Tensor:
        hidden: Tensor = self.model(**inputs, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.flatten(0, 1)[micro.select])[:, 0]
        return values
