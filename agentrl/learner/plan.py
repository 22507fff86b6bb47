"""Settings of the learner and of its low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from agentrl.core.settings import Count, CountOrZero, Fraction, NonNegative, Positive, ResumeMayChange
from agentrl.learner.backends import DEEPSPEED, BackendName, facts_of_backend
from agentrl.learner.optimizer_table import BETAS, OPTIMIZERS, OptimizerName


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """The optimizer, and the ways in which ranks compute a step: the same in reinforcement learning and on given rows."""

    lr_warmup_steps: CountOrZero = 0
    """Steps over which the learning rate rises to its peak, in the first of them to a share of 1 / N."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate behind the last step of ``linear`` and ``cosine``, as a share of the peak."""
    optimizer: OptimizerName = "adamw"
    """``muon``: torch's for the matrices of layers, AdamW for embeddings, output layer and vectors; ``adafactor``: torch's, whose update is
    the learning rate times the size of a parameter (root mean square). Both need ``--zero-stage 0``. ``adamw_8bit``: that of bitsandbytes,
    which keeps its state in 8 bits (``pip install 'agentrl[qlora]'``)."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; vectors do not decay."""
    adam_betas: tuple[Fraction, Fraction] = BETAS
    """Decay rates of AdamW's two moments."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    ema_decay: Annotated[float, Ge(0), Lt(1)] | None = None
    """Keep an exponential moving average of the weights with this decay and save it beside the model; typically 0.99."""
    attn_implementation: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel of the learner's model. ``sdpa`` and ``eager`` pad rows, the others put them back to back. ``auto``: ``sdpa`` on
    CPU, the newest flash attention installed on GPU, or else ``varlen`` (torch's own); ``sdpa`` or ``eager`` if the model needs it."""
    share_prompts: bool = True
    """Compute tokens with which rows of a group or pair begin alike once, as a prefix tree: prompts, contexts, turns before a fork.
    Only where the model attends to everything and the kernel is not ``eager``."""
    sequence_parallel: Count = 1
    """Ranks that run each micro-batch together, each with a part of the tokens (long rows); divides the number of ranks."""
    learner_tensor_parallel: Count = 1
    """Ranks that run each micro-batch together, each with a part of every layer (DeepSpeed AutoTP); divides the number of ranks."""
    tiled_mlp: bool = False
    """Run the MLP of each layer over a part of the tokens at a time and again in the backward pass (long rows)."""
    offload: tuple[Literal["optimizer", "activations", "reference", "ema"], ...] = ()
    """Parts kept in CPU memory (GPU training): the state of the ``optimizer``, which torch's AdamW then updates there (ZeRO 1 to 3); the
    ``activations`` that ``--gradient-checkpointing`` saves; frozen models, the reference and the teacher (``reference``), which are on
    the GPU only while they score a step; the moving average of ``--ema-decay`` (``ema``)."""
    compile_layers: bool = False
    """Compile each layer of the model with ``torch.compile``; the first steps take minutes (ZeRO 0 to 2)."""
    fp32_lm_head: bool = False
    """Compute the logits of training in float32 where the rest is bfloat16."""
    load_in_4bit: bool = False
    """Keep the learner's frozen weights in 4 bits (QLoRA); needs ``pip install 'agentrl[qlora]'``."""
    deepspeed_args: tuple[str, ...] = ()
    """Settings of DeepSpeed's configuration, as ``name=value``: ``zero_hpz_partition_size``, ``zero_quantized_weights`` and
    ``zero_quantized_gradients`` (ZeRO 3), ``communication_data_type=fp32``, and ``deepcompile``, which compiles the whole policy. See
    ``docs/large_models.md``."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(ComputeConfig):
    """DeepSpeed, or PyTorch alone."""

    learner_backend: Annotated[BackendName, ResumeMayChange] = DEEPSPEED
    """Library that trains: ``deepspeed``; ``torch``: PyTorch alone, on one rank in float32, which starts without DeepSpeed."""
    num_learners: Annotated[Count, ResumeMayChange] = 1
    """Data-parallel learner ranks."""
    zero_stage: Annotated[int, Ge(0), Le(3), ResumeMayChange] = 2
    """DeepSpeed ZeRO stage, 0 to 3; in bfloat16 0 means 1, which sums the gradients of micro-batches in float32. By optimizer: 0 for
    ``muon`` and ``adafactor``, and with ``--learner-backend torch``, unless given."""
    learner_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of training. ``auto``: float32 on CPU, bfloat16 on GPU; float32 for ``--optimizer muon`` and ``adafactor``, and
    with ``--learner-backend torch``."""
    learning_rate: Positive = 5e-4
    """Peak learning rate of the policy. By model, unless given: 1e-5 from 5e7 parameters, 1e-6 from 5e8; ten times as much with
    ``--lora-rank``, 2e-3 beside the bundled model."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; ``linear`` and ``cosine`` end behind the last step, as in transformers."""
    micro_batch_tokens: Annotated[Count, ResumeMayChange] = 16384
    """Tokens, padding included, that go through the model at once on one rank. By model, unless given: 8192 from 2e10 parameters."""
    gradient_checkpointing: Annotated[bool, ResumeMayChange] = False
    """Recompute activations in the backward pass: less memory, about a third more time. By model, unless given: on from 5e8 parameters."""
    train_vision: bool = False
    """Train the vision part of a model that reads images too; off: only the layers behind it."""
    critic_learning_rate: NonNegative = 1e-3
    """Peak learning rate of the critic of ``gae``; schedule and optimizer are those of the policy. By model, unless given: 1e-4 from 5e7
    parameters, 1e-5 from 5e8."""
    critic_warmup_steps: CountOrZero = 0
    """First steps in which only the critic is trained."""
    value_clip: Positive | None = 0.2
    """Distance that a value may move from its state when the batch was taken; none switches clipping off."""

    def dtype(self, device: Literal["cpu", "cuda"]) -> str:
        """Return the data type of training on this kind of device."""
        if self.learner_dtype != "auto":
            return self.learner_dtype
        whole = OPTIMIZERS[self.optimizer].whole or facts_of_backend(self.learner_backend).float32
        return "bfloat16" if device == "cuda" and not whole else "float32"


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters. The model stays as it is, and small matrices beside its layers are trained."""

    lora_rank: CountOrZero = 0
    """Rank of the matrices that are trained beside each layer, typically 8 to 64; 0 trains the model itself."""
    lora_alpha: Count = 32
    """The product of the two matrices of a layer is scaled by this over ``--lora-rank``."""
    lora_target_modules: str = ALL_LINEAR
    """Layers with an adapter: names or their ends with commas between them, ``q_proj,v_proj``; ``all-linear``: all but the output layer."""
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each adapter's inputs that a step leaves out, the same ones for all tokens and passes of the step."""
    lora_variant: tuple[Literal["rslora", "dora"], ...] = ()
    """``rslora`` scales by ``--lora-alpha`` over the square root of the rank, so that high ranks do not learn more slowly; ``dora`` trains
    the length of each row of a weight apart from its direction, which A and B change, and takes longer."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names in `lora_target_modules`."""
        return tuple(filter(None, map(str.strip, self.lora_target_modules.split(","))))
