"""Configuration of DeepSpeed, from the settings of the learner; nothing heavy is imported."""

from __future__ import annotations

from typing import Any

from agentrl.learner.plan import LearnerConfig
from agentrl.learner.settings import BUCKET_ELEMENTS


def deepspeed_config(config: LearnerConfig, *, bf16: bool, trained: bool = True) -> dict[str, Any]:
    """Return DeepSpeed's configuration; bfloat16 has float32 master weights, and a model that is not trained has no optimizer."""
    zero = zero_config(config, trained=trained)
    options: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # The number of micro-batches varies, so the boundary is set by hand and nothing is divided by this number; more
        # than 1 makes the offloading code accumulate at all.
        "gradient_accumulation_steps": 2 if trained else 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if config.learner_tensor_parallel > 1:
        options["tensor_parallel"] = {"autotp_size": config.learner_tensor_parallel, "vocab_parallel_lm_head": False}
    if config.deepcompile and trained:
        options["compile"] = {"deepcompile": True}
    if bf16:
        options["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if config.zero_stage:
            options["data_types"] = {"grad_accum_dtype": "fp32"}
        if config.fp32_communication:
            options["communication_data_type"] = "fp32"
    return options


def zero_config(config: LearnerConfig, *, trained: bool = True) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that is about ZeRO."""
    stage = config.zero_stage if trained or config.zero_stage == 3 else 0
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    if stage:
        zero["overlap_comm"] = True
    if config.zero_stage == 3:
        zero["zero_hpz_partition_size"] = config.zero_hpz_size if trained else 1  # for the backward pass
        zero["zero_quantized_weights"] = config.zero_quantized_weights
        zero["zero_quantized_gradients"] = config.zero_quantized_gradients and trained
    if config.optimizer_offload and config.zero_stage and trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.reference_offload and config.zero_stage == 3 and not trained:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero
