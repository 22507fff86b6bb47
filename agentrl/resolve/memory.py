"""The check of memory at the start of a run on GPUs, before anything is loaded."""

from __future__ import annotations

import math
import os
import subprocess
from typing import Literal

from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.core.model_shape import read_shape
from agentrl.core.operating_system import container_limit
from agentrl.core.process import cuda_torch, num_gpus
from agentrl.resolve.sizing.memory import GIB
from agentrl.resolve.sizing.plan import SPARE, Hardware, Plan, Workload, make_plan
from agentrl.resolve.sizing.search import as_flag, memory_remedy, remedies
from agentrl.track.tracker import RunWarning

CERTAIN = 1.15
"""Times the memory of a GPU from which a run is refused; below it the plan may be wrong, and a warning is enough."""


def gpu_bytes(device: Literal["auto", "cpu", "cuda"] = "auto") -> float:
    """Return the memory of the smallest GPU of this machine, as ``nvidia-smi`` reports it; 0 if none is used or can be asked."""
    if not num_gpus(device):
        return 0.0
    # PyTorch would know it too, but is not imported before a run starts.
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(float(line) for line in answer.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0.0


def device_sign(config: TrainConfig) -> RunWarning | None:
    """Return a warning if PyTorch is built for GPUs and none is seen, which is most often a mistake of a container."""
    cuda = cuda_torch()
    if config.run.device != "auto" or config.run.ray_address or not cuda or num_gpus("auto"):
        return None
    remedy = "Look at nvidia-smi and, in a container, at its flag for GPUs (docker run --gpus all); --device says what is meant."
    return RunWarning("device", f"PyTorch is built for CUDA {cuda}, and no GPU is seen: the run computes on the CPU", remedy)


def anywhere(gpu: float) -> Hardware:
    """Return as many GPUs of `gpu` bytes as anybody wants: their number is for Ray to judge, which knows the machines of a cluster."""
    return Hardware(gpus=10**6, gpu_bytes=gpu, gpus_per_node=10**6)


def with_shares(config: TrainConfig, gpu: float = 0.0) -> TrainConfig:
    """Return the settings with the GPU memory that learner ranks keep beside their engines, unless the user or nobody knows it.

    A run on one GPU of `gpu` bytes that does not fit into it gets the settings that save memory at the least cost of time, if there are
    any: fewer tokens at once, activations computed again, an optimizer in CPU memory where there is room for it.
    """
    shape = read_shape(config.model.model) if config.weights.colocate else None
    if shape is None:
        return config
    work = _longest(config)
    if gpu and config.learner.num_learners == 1 and "memory" not in config.training.skip_checks and not config.run.ray_address:
        plan = make_plan(config, shape, Hardware(gpus=1, gpu_bytes=gpu, host_bytes=host_bytes()), work)
        if plan.problems and (remedy := memory_remedy(plan, work)) is not None:
            config = remedy.plan.config
    return make_plan(config, shape, anywhere(GIB), work).sized


def savings(asked: TrainConfig, config: TrainConfig) -> str:
    """Return the flags that `with_shares` added to what was asked for; "" if there are none."""
    now, before = ({**vars(each.learner), "weight_bucket_mib": each.weights.weight_bucket_mib} for each in (config, asked))
    saved = {name: value for name, value in now.items() if value != before[name]}
    return " ".join(as_flag(name, value) for name, value in saved.items())


def _longest(config: TrainConfig) -> Workload:
    """Return the longest turn that the settings ask for; prompts are not known yet."""
    return Workload(prompt_tokens=1, answer_tokens=config.rollout.max_new_tokens)


def host_bytes() -> float:
    """Return the CPU memory of this machine, or of the container that it is."""
    return min(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), container_limit("memory.max") or math.inf)


def memory_sign(config: TrainConfig, gpu: float) -> RunWarning | None:
    """Return a warning if a run will hardly fit into GPUs of `gpu` bytes; nothing is said about a model whose sizes are not known here.

    Raises:
        ConfigError: If it certainly does not fit, unless that check is skipped.
    """
    shape = read_shape(config.model.model)
    if not gpu or shape is None:
        return None
    work = _longest(config)
    plan = make_plan(config, shape, anywhere(gpu), work)
    if not plan.problems:
        return None
    problem, remedy = "; ".join(plan.problems), _remedy(plan, work)
    if "memory" not in config.training.skip_checks and (plan.learner_bytes > CERTAIN * gpu or _weights_are_too_large(plan)):
        more = "`agentrl plan` lists the parts; --skip-checks memory tries all the same."
        raise ConfigError("--model", config.model.model, problem, f"{remedy} {more}")
    return RunWarning("memory", f"GPU memory is likely to run out: {problem}", remedy)


def _weights_are_too_large(plan: Plan) -> bool:
    """Return True if an engine's weights alone are more than its share of a GPU; what else it needs is partly assumed."""
    gpu = plan.hardware.gpu_bytes
    return plan.engine.weights > gpu * plan.sized.engine.memory_share(plan.sized.weights, gpu)


def _remedy(plan: Plan, work: Workload) -> str:
    found = remedies(plan, work)
    if not found:
        return "Use more learner ranks with --zero-stage 3, or larger GPUs."
    best, limit = found[0], SPARE * plan.hardware.gpu_bytes / GIB
    needs = f"then a learner rank needs {best.plan.learner_bytes / GIB:.1f} GiB of {limit:.1f}"
    return f"Add {best.flags}{f', {best.kind}' if best.kind else ''}: {needs}."
