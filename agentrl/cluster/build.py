"""From the configuration to the objects of a worker process; used by every runtime.

What is heavy is imported inside the functions, because the driver imports this module too.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.assets import tiny_model_path
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.plugins import is_plugin
from agentrl.core.process import LOOPBACK, num_gpus
from agentrl.core.protocols import Engine, RolloutWorker
from agentrl.core.scoring import Scorer
from agentrl.core.teaching import Teacher
from agentrl.engine.own import load_engine_class
from agentrl.engine.settings import Device, EngineSettings, engine_environment, weight_transport
from agentrl.env.agent import has_snapshots
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.env.plan import ANSWER
from agentrl.rollout.partner_specs import check_partners
from agentrl.suites.load import check_servers, load_agent
from agentrl.weights.plan import WeightsConfig

if TYPE_CHECKING:
    from agentrl.weights.sender import WeightSender

Stage = Callable[[str], None]
"""Told what start-up is doing, in a few words for the display."""


def model_path(config: PlaySettings) -> str:
    """Return the directory or hub name of the initial policy; the bundled model unless ``--model`` names one."""
    return config.model.model or str(tiny_model_path())


MAX_SENT = 60_000
"""Bytes of an environment that processes of its own can be given; it goes in one packet."""


def load_environment(config: PlaySettings) -> AgentSpec:
    """Load the environment, and make sure that the other processes of the run can have it.

    Raises:
        EnvLoadError: If it cannot be loaded, or is an object of this process that cannot be sent.
        ConfigError: If the file of an engine cannot be used.
    """
    if is_plugin(config.engine.engine):
        load_engine_class(config.engine.engine)
    agent, isolated = load_agent(config.run.agent), config.isolation.env_isolation == "process"
    check_servers(agent, config.sandbox.mcp)
    _check_partners(config, agent)
    _check_forks(config, agent)
    size = len(pickle.dumps(agent)) if isolated or config.run.runtime == "ray" else 0
    if isolated and size > MAX_SENT:
        problem = f"takes {size:,} bytes with what it refers to, and --env-isolation process sends {MAX_SENT:,} at most"
        raise EnvLoadError("--agent", agent.spec, problem, "Load what is large inside reset, or put the class into a file and name that.")
    return agent


def _check_partners(config: PlaySettings, agent: AgentSpec) -> None:
    spec = multi_agent_spec(agent.load(), agent.source)
    check_partners(config.partner, spec.agents if spec.several else (), sorted(spec.trained), agent.name)


def _check_forks(config: PlaySettings, agent: AgentSpec) -> None:
    """Refuse to fork the episodes of an environment whose state cannot be handed on."""
    if not isinstance(config, TrainConfig) or config.flow.branch_at == "never":
        return
    if agent.kind.calls_model:
        problem, remedy = f"{agent.name} calls the model itself, so its episodes cannot be forked", "Leave it out, or write reset and step."
    elif config.isolation.env_isolation == "none" and not has_snapshots(agent.load()):
        problem = f"{agent.name} has no methods snapshot and restore"
        remedy = "Write them as docs/forks.md shows, or add --env-isolation process."
    else:
        return
    raise ConfigError("--branch-at", config.flow.branch_at, problem, remedy)


def device(asked: Literal["auto", "cpu", "cuda"] = "auto") -> Device:
    """Return the kind of device that this process computes on, with ``--device`` as it was `asked` for."""
    return "cuda" if num_gpus(asked) else "cpu"


def worker_environment(config: PlaySettings, on: Device | None = None) -> dict[str, str]:
    """Return the environment variables that worker processes start with; libraries read some of them only once.

    The number of threads of a process is the user's ``OMP_NUM_THREADS``, if it is set. `on` is the kind of device, this process's if
    it is not given.
    """
    own = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    on = on or device(config.run.device)
    return {
        **engine_environment(on, weight_transport(config.engine, weights_of(config), on)),
        "DS_ACCELERATOR": on,
        "PYTHONWARNINGS": "ignore",
        "RAY_USE_UVLOOP": "0",  # it takes 30 ms to start a program from a process of 900 MiB, asyncio 3
        **own,
    }


def actor_environment(config: PlaySettings, on: Device) -> dict[str, str]:
    """Return `worker_environment` for actors; with ``--device cpu`` they see no GPU, since libraries look for some by themselves."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if config.run.device == "cpu" else {}
    return {**worker_environment(config, on), **hidden}


def weights_of(config: PlaySettings) -> WeightsConfig:
    """Return the settings of weights on their way to engines; the defaults where nothing is trained."""
    return config.weights if isinstance(config, TrainConfig) else WeightsConfig()


def engine_settings(config: PlaySettings, index: int, on: Device | None = None) -> EngineSettings:
    """Return the settings of engine number `index`."""
    model = replace(config.model, model=model_path(config))
    settings = EngineSettings(
        model=model,
        engine=config.engine,
        weights=weights_of(config),
        device=on or device(config.run.device),
        seed=config.run.seed,
        index=index,
        max_images=config.images.max_images,
    )
    if not isinstance(config, TrainConfig):
        return settings
    settings = replace(settings, routed_experts=config.algo.router_replay)
    if config.weights.publish != "adapter":
        return settings
    return replace(settings, adapters=config.flow.staleness + 1, lora_rank=config.lora.lora_rank)


def build_engine(config: PlaySettings, index: int = 0, on: Device | None = None) -> Engine:
    """Return engine number `index`; nothing is loaded before its `start`.

    Raises:
        ConfigError: If it is the user's own, and its file cannot be used.
    """
    settings = engine_settings(config, index, on)
    if is_plugin(config.engine.engine):
        own: Engine = load_engine_class(config.engine.engine)(settings)
        return own
    if config.engine.uses_vllm:
        from agentrl.engine.vllm_engine import VllmEngine

        return VllmEngine(settings)
    from agentrl.engine.transformers_engine import TransformersEngine

    return TransformersEngine(settings)


def build_scorer(config: PlaySettings, index: int, on: Device | None = None) -> Scorer:
    """Return reward model number `index` of ``--reward-model`` in this process; nothing is loaded before its `start`."""
    from agentrl.engine.reward_model import RewardModel, RewardModelSettings
    from agentrl.engine.scoring import BatchedScorer

    reward, batch_size = config.reward, config.rollout.reward_batch_size
    settings = RewardModelSettings(
        model=reward.reward_model[index],
        policy=model_path(config),
        head=reward.value_head_prefix,
        device=(on or device(config.run.device)) if reward.reward_model_gpus else "cpu",
        dtype=reward.reward_model_dtype,
        batch_size=batch_size,
        max_tokens=reward.reward_model_max_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )
    name, alone = reward.reward_model[index], config.run.agent == ANSWER
    return BatchedScorer(RewardModel(settings), batch_size=batch_size, name=name, as_messages=alone)


def build_worker(
    config: PlaySettings, index: int, on: Device | None = None, scorers: Mapping[str, Scorer] | None = None, engine: Engine | None = None
) -> RolloutWorker:
    """Return a rollout worker with `engine`, or engine number `index` if it is not given; nothing is loaded before its `start`.

    `scorers` are reward models by name.
    """
    from agentrl.engine.parsers import fit_parser
    from agentrl.rollout.settings import episode_settings
    from agentrl.rollout.worker import EpisodeWorker

    settings = episode_settings(config, model_path(config))
    own = engine or build_engine(config, index, on)
    models = partial(_partner_engine, config, on), partial(_teacher_model, config, on)
    return EpisodeWorker(own, load_agent(config.run.agent), settings, fit_parser, scorers, *models)


def _teacher_model(config: PlaySettings, on: Device | None, model: str) -> Teacher:
    """Return a teacher beside a rollout worker, in the type that the learner trains in."""
    from agentrl.engine.teacher_model import TeacherModel

    kind = on or device(config.run.device)
    dtype = config.learner.dtype(kind) if isinstance(config, TrainConfig) else "float32"
    return TeacherModel(model, device=kind, dtype=dtype, trust_remote_code=config.model.trust_remote_code)


def _partner_engine(config: PlaySettings, on: Device | None, model: str) -> Engine:
    """Return the engine of a partner's model, which never gets new weights."""
    from agentrl.engine.transformers_engine import TransformersEngine

    settings = engine_settings(config, 0, on)
    return TransformersEngine(replace(settings, model=replace(settings.model, model=model), adapters=0, routed_experts=False))


def build_learner_rank(config: TrainConfig, rank: int = 0, on: Device | None = None, host: str = LOOPBACK) -> Any:
    """Return one learner rank; nothing is loaded before its `start`. Engines on other machines reach it at `host`."""
    from agentrl.learner.learner import LearnerRank
    from agentrl.learner.settings import settings_from

    on = on or device(config.run.device)
    return LearnerRank(settings_from(config, model=model_path(config), device=on), _sender(config, rank, on, host))


def _sender(config: TrainConfig, rank: int, on: Device, host: str) -> WeightSender:
    from agentrl.weights.cuda import GroupSender
    from agentrl.weights.sender import AdapterSender, SharedMemorySender, never

    kind, lora, weights = weight_transport(config.engine, config.weights, on), config.lora, config.weights
    run = config.training
    held = run.evaluates_after if run.eval_engines else never
    if weights.publish == "adapter":
        from agentrl.engine.adapters import SPARE_ADAPTERS

        kept = config.flow.staleness + 1 + SPARE_ADAPTERS
        return AdapterSender(rank=lora.lora_rank, alpha=lora.lora_alpha, rslora=lora.use_rslora, kept=kept, held=held)
    if kind == "shm":
        return SharedMemorySender(_weights_folder(config), held)
    bucket_bytes, timeout_s, workers = weights.weight_bucket_mib * 2**20, weights.publish_timeout_s, config.engine.gpus_per_engine
    return GroupSender(kind, workers=workers, host=host, rank=rank, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


def _weights_folder(config: TrainConfig) -> Path | None:
    """The folder for files with weights on their way to engines; `None` stands for shared memory."""
    if config.weights.weight_transport != "disk" or config.training.run_dir is None:
        return None
    return config.training.run_dir.absolute() / "weights"
