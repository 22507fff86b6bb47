"""Memory of a learner rank and of an engine, computed from the sizes of the model and the settings; nothing is loaded.

The formulas follow what is kept for the backward pass by transformers' decoder layers, the output layer in chunks
(`agentrl.learner.head`) and DeepSpeed's optimizers. Tests compare them with the tensors of small models on a CPU; on a GPU they have
not been compared with the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.teacher_specs import learner_teacher
from agentrl.config.schema import TrainConfig
from agentrl.core.model_shape import ModelShape, read_shape
from agentrl.core.named_args import parse_named_args
from agentrl.learner.backends import facts_of_backend
from agentrl.learner.settings import BUCKET_ELEMENTS, chunk_rows

GIB = 2**30
LIVE_PARAMETERS = 10**9  # parameters that ZeRO-3 keeps gathered, DeepSpeed's default
CONTEXT = 1.0 * GIB  # CUDA context and libraries of a process
ENGINE_EXTRA = 2.5 * GIB  # context, CUDA graphs and activations of an engine, assumed
BYTES_IN_4_BITS = 0.516  # of a parameter, with a quantised scale for each 64 and a float32 scale for each 256 of those
QUANTISED: dict[tuple[str, ...], float] = {
    ("fp8", "int8", "w8a8", "mxfp8"): 1.0,
    ("awq", "gptq", "bitsandbytes", "mxfp4", "nvfp4", "fp4"): BYTES_IN_4_BITS,
}
"""Parts of the names of vLLM's quantisations, and the bytes of a parameter of a linear layer; with others it takes its data type's."""

OFFLOADED_BYTES, OFFLOADED_BYTES_ZERO3 = 18, 20
"""CPU memory of a parameter whose optimizer is there: master weight, two moments and gradient in float32, and a copy of the weight or,
under ZeRO-3, of the gradient."""

BATCH_BYTES = 96  # of a sampled token of the step: flat tensors, and float64 copies while advantages are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Memory of one GPU of an engine."""

    weights: float  # bytes
    extra: float  # bytes beside weights and cache
    cache: float  # bytes left for the KV cache; negative if the weights alone do not fit
    cache_tokens: int  # tokens that the cache of the whole engine holds
    token_bytes: float  # bytes of a token in the cache of one GPU


def number_bytes(config: TrainConfig) -> int:
    """Return the bytes of a number that the learner computes with: 2 in bfloat16, with float32 master weights, or 4 in float32."""
    return 4 if config.learner.dtype("cuda") == "float32" else 2


def learner_parts(config: TrainConfig, shape: ModelShape, *, step_tokens: int = 0, row_tokens: int = 0) -> dict[str, float]:
    """Return what the GPU of the busiest learner rank holds at the peak of a step, the largest thing of each kind, in bytes by name.

    Args:
        config: The settings.
        shape: Sizes of the model.
        step_tokens: Sampled tokens of a step.
        row_tokens: Tokens of the longest row, which is a micro-batch also where it is longer than ``--micro-batch-tokens``.
    """
    learner, algo, width = config.learner, config.algo, number_bytes(config)
    parts_of_layers, native = learner.learner_tensor_parallel, config.weights.publish == "adapter"
    whole = shape.embedding * (1 if shape.tied else 2)
    trained = whole + (shape.parameters - whole) // parts_of_layers
    critic = estimator_facts(algo.advantage_estimator).needs_critic
    models = [trained, *([trained - (0 if shape.tied else shape.embedding)] if critic else [])]
    adapter = adapter_parameters(shape, config.lora.lora_rank)
    states = [_adapted_states(size, adapter, shape, config) if adapter else _states(size, config, whole) for size in models]
    sharded = learner.num_learners // parts_of_layers if learner.zero_stage == 3 else 1
    offload = "optimizer" in learner.offload and learner.zero_stage > 0
    there = not offload or (learner.zero_stage < 3 and width == 2)  # in float32 below ZeRO-3, before they go to CPU memory
    parameters, gradients, optimizer = map(sum, zip(*states, strict=True))
    parts = {"parameters": parameters, "gradients": gradients if there else 0.0, "optimizer": 0.0 if offload else optimizer}
    parts |= facts_of_backend(learner.learner_backend).copies(trained, learner, width=width)
    if algo.init_kl_coef > 0 and not adapter and "reference" not in learner.offload:  # the reference is the model with the adapter off
        parts["reference model"] = trained * width / sharded
    if (model := learner_teacher(algo.teacher)) and "reference" not in learner.offload and (taught := read_shape(model)) is not None:
        parts["teacher"] = taught.parameters * width / sharded
    if learner.ema_decay is not None and "ema" not in learner.offload:
        parts["moving average"] = (adapter or trained) * 4 / sharded
    tokens = max(learner.micro_batch_tokens, row_tokens) / learner.sequence_parallel
    checkpointing = learner.gradient_checkpointing
    parts |= micro_batch_parts(
        shape, math.ceil(tokens), width=width, checkpointing=checkpointing, parts=parts_of_layers, frozen=bool(adapter)
    )
    parts["buffers"] = _buffers(shape, config, adapter or sum(models)) + CONTEXT + BATCH_BYTES * step_tokens
    if _stage(config) == 1 and not offload:  # a copy of its own gradients when the rest of a step is over
        parts["buffers"] += max(0.0, gradients / learner.num_learners - parts["activations"] - parts["logits"])
    if _alone(config):  # the largest gradient in 64 bits, for its norm
        largest = 0 if adapter else shape.embedding
        parts["buffers"] += max(0.0, largest * 8 - parts["activations"] - parts["logits"])
    if native:
        parts["for the engines"] = adapter * width
    elif config.weights.weight_transport in ("auto", "nccl", "ipc"):  # two buckets, which end with the tensor that fills them
        parts["for the engines"] = 2.0 * (config.weights.weight_bucket_mib * 2**20 + shape.embedding * width)
    return parts


def parts_beside_engine(config: TrainConfig, parts: Mapping[str, float]) -> dict[str, float]:
    """Return those of the parts of a learner rank that are on its GPU while an engine generates there: with turns, what is not trained.

    Bytes of the process itself are among them.
    """
    if not config.weights.sleeps:
        return dict(parts)
    stay = {"second copy (hpZ)", "reference model", "teacher", "moving average", *(["parameters"] if config.lora.lora_rank else [])}
    return {**{name: size for name, size in parts.items() if name in stay}, "process": CONTEXT}


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return the parameters of an adapter of `rank` beside every linear layer; fused experts have none."""
    width, queries, inner = shape.hidden_size, shape.heads * shape.head_dim, shape.shared_width if shape.experts else shape.ffn_width
    attention = 2 * (width + queries) + 2 * width + shape.kv_width
    if shape.latent is not None:
        attention = sum(map(sum, shape.latent.layers(width, shape.heads)))
    return rank * shape.layers * (attention + (3 * (width + inner) if inner else 0))


def _adapted_states(size: int, adapter: int, shape: ModelShape, config: TrainConfig) -> tuple[float, float, float]:
    """As `_states` of a model that stays as it is, whole or in 4 bits, and of the adapter beside it."""
    width = number_bytes(config)
    frozen = float(size * width)
    if config.learner.load_in_4bit:
        whole = min(size, shape.embedding * (1 if shape.tied else 2))  # embeddings and output layer
        frozen = whole * width + (size - whole) * BYTES_IN_4_BITS
    if config.learner.zero_stage == 3:
        frozen /= config.learner.num_learners
    parameters, gradients, optimizer = _states(adapter, config)
    return frozen + parameters, gradients, optimizer


def _stage(config: TrainConfig) -> int:
    """The ZeRO stage of the learner, which is at least 1 in bfloat16."""
    return max(config.learner.zero_stage, int(number_bytes(config) == 2))


def _alone(config: TrainConfig) -> bool:
    """True for a rank that sums its gradients without DeepSpeed's buckets, see `agentrl.learner.deepspeed.gradients`."""
    return (
        _stage(config) == 2 and number_bytes(config) == 2 and config.learner.num_learners == 1 and "optimizer" not in config.learner.offload
    )


def _states(size: int, config: TrainConfig, outside: int = 0) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer of one trained model on one rank, `outside` of whose layers are so many parameters."""
    learner = config.learner
    return facts_of_backend(learner.learner_backend).states(size, learner, width=number_bytes(config), outside=outside)


def micro_batch_parts(
    shape: ModelShape, tokens: int, *, width: int, checkpointing: bool, parts: int = 1, frozen: bool = False
) -> dict[str, float]:
    """Return the activations and the logits of a micro-batch at its peak, all of whose tokens are sampled.

    The peak is either while the logits are there or in the backward pass of a layer; what the layer needs beyond the logits counts as
    activations. Attention keeps its inputs and its output, not the scores: true for the kernels that need no mask. A rank has one of
    the `parts` of every layer, and computes with numbers of `width` bytes. The output layer of a `frozen` model has no gradient.
    """
    kinds = [(shape.expert_layers, *_layer(shape, width, parts, routed=True))] if shape.expert_layers else []
    if shape.layers > shape.expert_layers:
        kinds += [(shape.layers - shape.expert_layers, *_layer(shape, width, parts, routed=False))]
    activations = tokens * sum(count * (shape.hidden_size * width if checkpointing else layer) for count, layer, _ in kinds)
    temporary = max(tokens * (2 * inner * width + (layer if checkpointing else 0)) for _, layer, inner in kinds)
    if shape.expert_layers and not frozen:  # the gradient of a block's first two matrices is one tensor, made when much else is gone
        _, layer, inner = kinds[0]
        gone = 2 * inner + shape.experts_per_token * shape.hidden_size
        temporary = max(temporary, tokens * (layer - gone * width) + shape.expert_block * 2 / 3 * width)
    if shape.tied and not frozen:  # that of the output layer waits for that of the embedding
        temporary += shape.embedding * width
    output = _logits(shape, tokens, width, frozen=frozen)
    return {"activations": activations + max(0.0, temporary - output), "logits": output}


def _norm(width: int) -> int:
    """Bytes that a norm keeps for a number: its float32 input, normalised, and scaled."""
    return 4 + 2 * width


def _layer(shape: ModelShape, width: int, parts: int, *, routed: bool) -> tuple[float, float]:
    """Bytes that a layer keeps for a token, and the inner width that the token goes through; `routed` for a layer with experts."""
    queries = shape.heads * shape.head_dim
    inner, choosing = float(shape.ffn_width), 0.0
    if routed:
        inner = shape.experts_per_token * shape.expert_width + shape.shared_width
        choosing = shape.experts_per_token * 3 * shape.hidden_size * width + 8 * shape.experts
    heads = (queries + shape.kv_width / 2) * (4 + width) if shape.head_norms else 0.0
    attention = 2 * queries * width + shape.kv_width * width + 4 * shape.heads
    if shape.latent is not None:  # queries, keys, what keys and values come from, outputs, and the narrow vectors with their norms
        each = 2 * shape.head_dim + shape.latent.nope_dim + 2 * shape.latent.value_dim
        attention = shape.heads * (each * width + 4) + (shape.latent.query_rank + shape.latent.kv_rank) * _norm(width)
    return 2 * _norm(width) * shape.hidden_size + (attention + heads + 4 * inner * width) / parts + choosing, inner / parts


def _logits(shape: ModelShape, tokens: int, width: int, *, frozen: bool) -> float:
    """Return the bytes of a chunk of logits, of the gradient of the output layer in float32, and of the hidden states before it.

    At the end, when the chunks are gone, that gradient is rounded.
    """
    rows = min(tokens, chunk_rows(shape.vocabulary))
    chunks = math.ceil(tokens / rows)
    chunk = rows * shape.vocabulary * (12 + width + (width if chunks > 2 else 0))
    summed = 0 if frozen or chunks == 1 else shape.embedding * 4
    rounded = shape.embedding * width if summed and width < 4 else 0
    return max(chunk, rounded) + summed + tokens * shape.hidden_size * (_norm(width) + (2 if chunks > 1 else 1) * width)


def _buffers(shape: ModelShape, config: TrainConfig, trained: int) -> float:
    """Return the bytes of DeepSpeed's buckets, of the gradients in one while they are summed over ranks, and of gathered parameters."""
    stage, width, filled = _stage(config), number_bytes(config), min(BUCKET_ELEMENTS, trained)
    if stage == 3:
        reduce = filled * (2 * width + 4 / config.learner.num_learners)
    else:
        number = 4 if stage == 1 else width  # ZeRO-1 sums in float32 before it sends
        buckets = 2 if stage == 2 or (stage and "optimizer" in config.learner.offload) else 0  # one is sent while the other fills
        reduce = 0 if _alone(config) else (buckets + bool(stage)) * filled * number
    # A block of experts is gathered whole, whichever of them a rank's tokens go to.
    gathered = max(min(LIVE_PARAMETERS, shape.parameters), shape.expert_block) * width if stage == 3 else 0
    return reduce + gathered


def host_bytes(config: TrainConfig, shape: ModelShape) -> float:
    """Return the CPU memory of the first learner rank and of its engine: while it loads, or later for what is offloaded, if that is more.

    Under ZeRO-3 the first rank reads the whole model and hands it out, and layers are divided in CPU memory; otherwise weights go from
    their files to the GPU.
    """
    loads = config.learner.zero_stage == 3 or config.learner.learner_tensor_parallel > 1
    return max(shape.parameters * number_bytes(config) if loads else 0.0, offloaded_bytes(config, shape))


def offloaded_bytes(config: TrainConfig, shape: ModelShape) -> float:
    """Return the CPU memory of any learner rank and of the engine on its GPU for what is not on the GPU, always or at times."""
    size, learner, weights = shape.parameters, config.learner, config.weights
    trained = adapter_parameters(shape, config.lora.lora_rank) or size  # the frozen weights of an adapter's model stay on the GPU
    sharded = learner.num_learners if learner.zero_stage == 3 else 1
    each = OFFLOADED_BYTES_ZERO3 if learner.zero_stage == 3 else OFFLOADED_BYTES
    offloaded = trained * each / learner.num_learners if "optimizer" in learner.offload else 0.0
    if "reference" in learner.offload:
        offloaded += size * number_bytes(config) / sharded
    if "ema" in learner.offload:
        offloaded += trained * 4 / sharded
    if weights.sleeps:  # buffers of both stay
        outside = 0 if config.lora.lora_rank else shape.embedding * (1 if shape.tied else 2)
        parameters, gradients, optimizer = _states(trained, config, outside)
        offloaded += parameters + (0.0 if "optimizer" in learner.offload else gradients + optimizer)
    if weights.sleeps and weights.sleep_level == 1:
        offloaded += served_bytes(config, shape) / config.engine.gpus_per_engine
    return offloaded


def engine_plan(config: TrainConfig, shape: ModelShape, gpu: float) -> EnginePlan:
    """Return the memory of a GPU of `gpu` bytes that serves an engine; layers are divided over tensor and pipeline parallel workers."""
    engine, arguments = config.engine, parse_named_args(config.engine.engine_args)
    weights = served_bytes(config, shape) / engine.gpus_per_engine
    cache = gpu * engine.memory_share(config.weights, gpu) - weights - ENGINE_EXTRA
    cached = 1 if str(arguments.get("kv_cache_dtype", "")).startswith(("fp8", "int8")) else _served_number(config)
    stages = engine.gpus_per_engine // engine.tensor_parallel_size
    per_token = shape.layers / stages * shape.cached_width(engine.tensor_parallel_size) * cached
    return EnginePlan(weights=weights, extra=ENGINE_EXTRA, cache=cache, cache_tokens=max(0, int(cache / per_token)), token_bytes=per_token)


def _served_number(config: TrainConfig) -> int:
    return 4 if config.engine.dtype("cuda") == "float32" else 2


def served_bytes(config: TrainConfig, shape: ModelShape) -> float:
    """Return the bytes of the model in an engine; a quantised one keeps embedding and output layer as they are."""
    method = str(parse_named_args(config.engine.engine_args).get("quantization") or shape.quantization)
    whole, number = shape.embedding * (1 if shape.tied else 2), _served_number(config)
    quantised = next((size for names, size in QUANTISED.items() if any(name in method for name in names)), float(number))
    return whole * number + (shape.parameters - whole) * quantised


ADAM = 12
"""Bytes that a parameter takes in a checkpoint: itself in float32 and two moments; in bfloat16 there is a copy of 2 bytes more."""


def checkpoint_bytes(config: TrainConfig, shape: ModelShape) -> int:
    """Return the estimated size of one checkpoint: what is trained, with the state of its optimizer."""
    trained = adapter_parameters(shape, config.lora.lora_rank) or shape.parameters
    critic = trained if estimator_facts(config.algo.advantage_estimator).needs_critic else 0
    return (trained + critic) * (ADAM + (2 if number_bytes(config) == 2 else 0))


def saved_bytes(config: TrainConfig) -> tuple[int, float]:
    """Return the bytes of one checkpoint and of the model that a run saves; 0 for what is not known here, or not saved."""
    shape = read_shape(config.model.model)
    if shape is None:
        return 0, 0.0
    return checkpoint_bytes(config, shape), shape.parameters * number_bytes(config) if config.record.save_model else 0.0
