"""Rules about the engines, the weights on their way to them, and the GPUs: settings go together, and this machine has what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from agentrl.cluster.plan import FEWER_GPUS, gpus_of
from agentrl.config.evaluate import NO_ENGINE, ServeConfig
from agentrl.config.learner_rules import needing_gpus
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import is_plugin, suggest
from agentrl.core.process import num_gpus
from agentrl.core.settings import refuse_set
from agentrl.engine.engine_args import check_engine_args
from agentrl.engine.facts import AUTO, ENGINES, EngineFacts
from agentrl.learner.plan import LearnerConfig


def num_engines(config: PlaySettings) -> int:
    """Return the engines of ``--num-engines`` and ``--eval-engines`` together."""
    return config.engine.num_engines + (config.training.eval_engines if isinstance(config, TrainConfig) else 0)


def _local_runtime_is_single(config: PlaySettings) -> None:
    if config.run.runtime != "local":
        return
    ranks = config.learner.num_learners if isinstance(config, TrainConfig) else 0
    workers = config.rollout.num_front_ends
    for flag, value in (("--num-engines", config.engine.num_engines), ("--num-learners", ranks), ("--rollout-workers-per-engine", workers)):
        if value > 1:
            raise ConfigError(flag, value, "--runtime local runs one of each in one process", "Use --runtime ray.")
    if isinstance(config, TrainConfig) and config.training.eval_engines:
        value = config.training.eval_engines
        raise ConfigError("--eval-engines", value, "--runtime local runs one engine in one process", "Use --runtime ray.")


def _shared_engines_fit(config: TrainConfig) -> None:
    workers = config.rollout.num_front_ends
    if workers > 1 and config.weights.colocate:
        problem = "does not go with --colocate, where engine and learner take turns on one machine"
        raise ConfigError("--rollout-workers-per-engine", workers, problem, "Leave out one of the two.")


def _budgets_fit(config: PlaySettings) -> None:
    budget, context = config.rollout.max_new_tokens, config.engine.max_model_len
    if context and budget >= context:
        raise ConfigError("--max-new-tokens", budget, f"leaves no room for a prompt in --max-model-len {context}", "Lower it.")


def _engine_is_known(config: PlaySettings) -> None:
    name, known = config.engine.engine, (AUTO, *ENGINES, *((NO_ENGINE,) if isinstance(config, ServeConfig) else ()))
    if name not in known and not is_plugin(name):
        remedy = f"{suggest(name, known)} Choose one of {', '.join(known)}, or give file.py:Name.".strip()
        raise ConfigError("--engine", name, "is not known", remedy)


def _engine_args_are_known(config: PlaySettings) -> None:
    check_engine_args(config.engine.engine_args)
    for flag, value in lacks(config, config.engine.facts):
        raise ConfigError(flag, value, "needs vLLM", "Use --engine vllm (pip install agentrl[vllm], on a CPU agentrl[cpu]).")


def lacks(config: PlaySettings, facts: EngineFacts) -> Iterator[tuple[str, Any]]:
    """Yield the flags of `config` that an engine which declares `facts` does not have, with their values."""
    engine, endpoint = config.engine, config.endpoint
    for flag, value, wanted, has in (
        ("--tensor-parallel-size", engine.tensor_parallel_size, engine.tensor_parallel_size > 1, facts.is_distributed),
        ("--engine-args", engine.engine_args, bool(engine.engine_args), facts.is_distributed),
        ("--engine-core", engine.engine_core, engine.engine_core != "auto", facts.has_core),
        ("--tool-parser", endpoint.tool_parser, endpoint.tool_parser not in ("auto", "json"), facts.has_parsers),
        ("--reasoning-parser", endpoint.reasoning_parser, bool(endpoint.reasoning_parser), facts.has_parsers),
        ("--publish", "adapter", isinstance(config, TrainConfig) and config.weights.publish == "adapter", facts.takes_adapters),
    ):
        if wanted and not has:
            yield flag, value


def _device_is_there(config: PlaySettings) -> None:
    if config.run.device == "cuda" and not config.run.ray_address and not num_gpus(config.run.device):
        problem = "neither the driver, nor NVML, nor PyTorch finds a GPU on this machine"
        raise ConfigError("--device", "cuda", problem, "Leave the flag out to train on the CPU, or join a cluster with --ray-address.")


def may_have_gpus(config: PlaySettings) -> bool:
    """Return whether engines and learner may be given GPUs: this machine's, or those of a cluster, which are not known yet."""
    return config.run.device != "cpu" and bool(config.run.ray_address or num_gpus(config.run.device))


def _core_has_its_place(config: PlaySettings) -> None:
    if config.engine.engine_core == "thread" and may_have_gpus(config):
        problem = "is for engines on a CPU, and this machine or cluster may have a GPU"
        raise ConfigError("--engine-core", "thread", problem, "Use --engine-core process, or --device cpu.")


def needed_gpus(config: PlaySettings) -> float:
    """Return the GPUs that engines, learner ranks and reward models take where there are some."""
    if not isinstance(config, TrainConfig):
        return gpus_of(config.engine, config.reward)
    ranks, eval_engines, colocated = config.learner.num_learners, config.training.eval_engines, config.weights.colocate
    return gpus_of(config.engine, config.reward, eval_engines=eval_engines, ranks=ranks, colocated=colocated)


def share_only_gpu(config: TrainConfig) -> TrainConfig:
    """Return the settings with ``--colocate`` where an engine and a learner rank have one GPU between them.

    That is on a machine with one GPU, and in one process (``--runtime local``). In an asynchronous run both stay in its memory, as they
    do with an engine of one's own, which may not know how to sleep.
    """
    single = num_engines(config) * config.engine.gpus_per_engine == config.learner.num_learners == 1
    gpus = 0 if config.run.ray_address else num_gpus(config.run.device)
    if not single or not gpus or config.rollout.num_front_ends > 1 or (gpus > 1 and config.run.runtime != "local"):
        return config
    resident = config.flow.staleness > 0 or is_plugin(config.engine.engine)
    return changed(config, colocate=True, **({"sleep_level": 0} if resident else {}))


def _gpus_are_enough(config: PlaySettings) -> None:
    gpus = 0 if config.run.ray_address or config.run.runtime == "local" else num_gpus(config.run.device)
    if gpus and needed_gpus(config) > gpus:
        problem = f"engines, learner ranks and reward models need {needed_gpus(config):g} GPUs, and this machine has {gpus}"
        raise ConfigError("--num-engines", config.engine.num_engines, problem, FEWER_GPUS)


def _gpu_flags_have_a_gpu(config: PlaySettings) -> None:
    if may_have_gpus(config):
        return
    engine, learner = config.engine, config.learner if isinstance(config, TrainConfig) else LearnerConfig()
    for flag, value, wanted in (
        ("--colocate", True, isinstance(config, TrainConfig) and config.weights.colocate),
        ("--engine-dtype", "float16", engine.engine_dtype == "float16"),
        *((*given, True) for given in needing_gpus(learner)),
    ):
        if wanted:
            remedy = "Leave the flag out, or join a cluster with --ray-address."
            cpu = config.run.device == "cpu"
            problem = "needs a GPU, and --device is cpu" if cpu else "needs a GPU, and this machine has none"
            raise ConfigError(flag, value, problem, "Leave out one of the two." if cpu else remedy)


def _weights_have_a_path(config: TrainConfig) -> None:
    engine, path = config.engine, config.weights.weight_transport
    if path == "auto":
        return
    flag, joins = "--weight-transport", config.run.ray_address
    if config.weights.publish == "adapter":
        raise ConfigError(
            flag, path, "does not go with --publish adapter, which writes adapters to shared memory", "Leave out one of them."
        )
    if path in ("nccl", "ipc"):
        if not engine.facts.joins_groups:
            raise ConfigError(flag, path, "needs vLLM", "Use shm or disk, or --engine vllm.")
        if not joins and not num_gpus(config.run.device):
            raise ConfigError(flag, path, "needs GPUs, and this machine has none", "Use shm or disk, or join a cluster with --ray-address.")
        if (path == "ipc") != config.weights.colocate:
            problem = "is for engines that share a GPU with a learner rank" if path == "ipc" else "cannot connect two processes on one GPU"
            raise ConfigError(flag, path, problem, "Add --colocate." if path == "ipc" else "Use ipc, or leave out --colocate.")


def _shared_gpus_are_divided(config: TrainConfig) -> None:
    engine, weights, ranks = config.engine, config.weights, config.learner.num_learners
    if not weights.colocate:
        unused = ("sleep_level", "learner_memory_gib")
        refuse_set(config.weights, unused, "has no effect without --colocate", "Add --colocate, or leave it out.")
        return
    if engine.num_engines * engine.gpus_per_engine != ranks:
        problem = f"--colocate gives every GPU of an engine to one learner rank: {engine.num_engines} x {engine.gpus_per_engine} GPUs"
        remedy = f"Make --num-engines times --tensor-parallel-size equal to --num-learners {ranks}."
        raise ConfigError("--num-engines", engine.num_engines, f"{problem}, {ranks} ranks", remedy)
    if weights.sleeps and config.flow.staleness:
        problem = "engines and learner take turns with --colocate, so nothing is generated while it trains"
        remedy = "Leave out --async, or add --sleep-level 0, with which both stay in GPU memory."
        raise ConfigError("--async" if config.flow.asynchronous else "--max-staleness", config.flow.staleness, problem, remedy)
    if weights.sleeps and config.learner.zero_stage < 2 and config.learner.dtype("cuda") != "float32":
        problem = "cannot be moved to CPU memory in bfloat16, which --colocate does while engines generate"
        raise ConfigError("--zero-stage", config.learner.zero_stage, problem, "Use --zero-stage 2, or --sleep-level 0.")
    if weights.sleep_level == 2 and config.weights.publish == "adapter":
        problem = "drops the weights of the engines, and --publish adapter does not send them again"
        raise ConfigError("--sleep-level", 2, problem, "Use --sleep-level 1.")


ENGINE_RULES: tuple[Callable[[PlaySettings], None], ...] = (
    _local_runtime_is_single,
    _budgets_fit,
    _engine_is_known,
    _engine_args_are_known,
    _device_is_there,
    _core_has_its_place,
    _gpu_flags_have_a_gpu,
    _gpus_are_enough,
)

WEIGHTS_RULES: tuple[Callable[[TrainConfig], None], ...] = (_shared_engines_fit, _shared_gpus_are_divided, _weights_have_a_path)
