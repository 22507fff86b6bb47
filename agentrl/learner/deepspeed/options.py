"""Configuration of DeepSpeed, from the settings of the learner; nothing heavy is imported."""

from __future__ import annotations

from typing import Any

from agentrl.learner.deepspeed.arguments import arguments, hpz_size
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
    given = arguments(config)
    if given.get("deepcompile") and trained:
        options["compile"] = {"deepcompile": True}
    if bf16:
        options["bf16"] = {"enabled": True, "check_grad_overflow": True}
        if config.zero_stage:
            options["data_types"] = {"grad_accum_dtype": "fp32"}
        if "communication_data_type" in given:
            options["communication_data_type"] = given["communication_data_type"]
    return options


def zero_config(config: LearnerConfig, *, trained: bool = True) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that is about ZeRO."""
    stage = config.zero_stage if trained or config.zero_stage == 3 else 0
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
    if stage:
        zero["overlap_comm"] = True
    if config.zero_stage == 3:
        given = arguments(config)
        zero["zero_hpz_partition_size"] = hpz_size(config) if trained else 1  # for the backward pass
        zero["zero_quantized_weights"] = given.get("zero_quantized_weights", False)
        zero["zero_quantized_gradients"] = given.get("zero_quantized_gradients", False) and trained
    if "optimizer" in config.offload and config.zero_stage and trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "reference" in config.offload and config.zero_stage == 3 and not trained:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero
