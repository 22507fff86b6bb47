"""From the plan of a run to the objects of a worker process; used by every runtime.

What is heavy is imported inside the functions, because the driver imports this module too.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.plugins import is_plugin
from agentrl.core.process import LOOPBACK, num_gpus
from agentrl.core.protocols import Engine, RolloutWorker
from agentrl.core.scoring import Scorer
from agentrl.core.teaching import Teacher
from agentrl.engine.own import load_engine_class
from agentrl.engine.settings import Device, EngineSettings, engine_environment
from agentrl.env.agent import has_snapshots
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.multi_agent import multi_agent_spec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.partner_specs import check_partners
from agentrl.suites.load import check_servers, load_agent
from agentrl.weights.plan import SenderPlan

if TYPE_CHECKING:
    from agentrl.weights.sender import WeightSender

Stage = Callable[[str], None]
"""Told what start-up is doing, in a few words for the display."""

MAX_SENT = 60_000
"""Bytes of an environment that processes of its own can be given; it goes in one packet."""


def load_environment(agent: str, engine: str, episodes: EpisodePlan, *, sent: bool) -> AgentSpec:
    """Load the environment, and make sure that the other processes of the run can have it.

    Args:
        agent: The environment, as ``--agent`` names it.
        engine: The engine, whose file is loaded too if it is the user's own.
        episodes: What it is to be played by.
        sent: True if other processes have to be given it.

    Raises:
        EnvLoadError: If it cannot be loaded, or is an object of this process that cannot be sent.
        ConfigError: If the file of an engine cannot be used.
    """
    if is_plugin(engine):
        load_engine_class(engine)
    spec, isolated = load_agent(agent), episodes.isolation.env_isolation == "process"
    check_servers(spec, episodes.sandbox.mcp)
    _check_partners(episodes, spec)
    _check_forks(episodes, spec)
    size = len(pickle.dumps(spec)) if isolated or sent else 0
    if isolated and size > MAX_SENT:
        problem = f"takes {size:,} bytes with what it refers to, and --env-isolation process sends {MAX_SENT:,} at most"
        raise EnvLoadError("--agent", spec.spec, problem, "Load what is large inside reset, or put the class into a file and name that.")
    return spec


def _check_partners(episodes: EpisodePlan, agent: AgentSpec) -> None:
    spec = multi_agent_spec(agent.load(), agent.source)
    check_partners(episodes.partner, spec.agents if spec.several else (), sorted(spec.trained), agent.name)


def _check_forks(episodes: EpisodePlan, agent: AgentSpec) -> None:
    """Refuse to fork the episodes of an environment whose state cannot be handed on."""
    if episodes.forks is None:
        return
    if agent.kind.calls_model:
        problem, remedy = f"{agent.name} calls the model itself, so its episodes cannot be forked", "Leave it out, or write reset and step."
    elif episodes.isolation.env_isolation == "none" and not has_snapshots(agent.load()):
        problem = f"{agent.name} has no methods snapshot and restore"
        remedy = "Write them as docs/forks.md shows, or add --env-isolation process."
    else:
        return
    raise ConfigError("--branch-at", episodes.forks.at, problem, remedy)


def device(asked: Literal["auto", "cpu", "cuda"] = "auto") -> Device:
    """Return the kind of device that this process computes on, with ``--device`` as it was `asked` for."""
    return "cuda" if num_gpus(asked) else "cpu"


def worker_environment(engine: EngineSettings) -> dict[str, str]:
    """Return the environment variables that worker processes start with; libraries read some of them only once.

    The number of threads of a process is the user's ``OMP_NUM_THREADS``, if it is set.
    """
    own = {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    return {
        **engine_environment(engine.device, engine.transport),
        "DS_ACCELERATOR": engine.device,
        "PYTHONWARNINGS": "ignore",
        "RAY_USE_UVLOOP": "0",  # it takes 30 ms to start a program from a process of 900 MiB, asyncio 3
        **own,
    }


def actor_environment(plan: ClusterPlan) -> dict[str, str]:
    """Return `worker_environment` for actors; with ``--device cpu`` they see no GPU, since libraries look for some by themselves."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if plan.run.device == "cpu" else {}
    return {**worker_environment(plan.engine), **hidden}


def build_engine(settings: EngineSettings) -> Engine:
    """Return an engine; nothing is loaded before its `start`.

    Raises:
        ConfigError: If it is the user's own, and its file cannot be used.
    """
    if is_plugin(settings.engine.engine):
        own: Engine = load_engine_class(settings.engine.engine)(settings)
        return own
    built: Engine = settings.engine.facts.load()(settings)
    return built


def build_scorer(plan: ClusterPlan, index: int) -> Scorer:
    """Return reward model number `index` of ``--reward-model`` in this process; nothing is loaded before its `start`."""
    from agentrl.engine.reward_model import RewardModel
    from agentrl.engine.scoring import BatchedScorer

    judge = plan.judges[index]
    return BatchedScorer(RewardModel(judge), batch_size=judge.batch_size, name=judge.model, as_messages=judge.as_messages)


def build_worker(plan: ClusterPlan, index: int, scorers: Mapping[str, Scorer] | None = None, engine: Engine | None = None) -> RolloutWorker:
    """Return a rollout worker with `engine`, or engine number `index` if it is not given; nothing is loaded before its `start`.

    `scorers` are reward models by name.
    """
    from agentrl.engine.parsers import fit_parser
    from agentrl.rollout.worker import EpisodeWorker

    own = engine or build_engine(plan.engine.at(index))
    models = partial(_partner_engine, plan.engine), partial(_teacher_model, plan)
    return EpisodeWorker(own, load_agent(plan.run.agent), plan.episodes, fit_parser, scorers, *models)


def _teacher_model(plan: ClusterPlan, model: str) -> Teacher:
    """Return a teacher beside a rollout worker, in the type that the learner trains in."""
    from agentrl.engine.teacher_model import TeacherModel

    dtype = plan.learner.dtype if plan.learner else "float32"
    return TeacherModel(model, device=plan.device, dtype=dtype, trust_remote_code=plan.episodes.model.trust_remote_code)


def _partner_engine(settings: EngineSettings, model: str) -> Engine:
    """Return the engine of a partner's model."""
    from agentrl.engine.transformers_engine import TransformersEngine

    return TransformersEngine(settings.of_model(model))


def build_learner_rank(plan: ClusterPlan, rank: int = 0, host: str = LOOPBACK) -> Any:
    """Return one learner rank; nothing is loaded before its `start`. Engines on other machines reach it at `host`.

    Raises:
        ValueError: If nothing is trained.
    """
    from agentrl.learner.learner import LearnerRank

    if plan.learner is None or plan.sender is None:
        raise ValueError("nothing is trained by this plan")
    return LearnerRank(plan.learner, _sender(plan.sender, rank, host))


def _sender(plan: SenderPlan, rank: int, host: str) -> WeightSender:
    from agentrl.weights.cuda import GroupSender
    from agentrl.weights.sender import AdapterSender, SharedMemorySender

    if plan.adapter is not None:
        each = plan.adapter
        return AdapterSender(rank=each.rank, alpha=each.alpha, rslora=each.rslora, kept=each.kept, held=plan.held)
    if plan.transport == "shm":
        return SharedMemorySender(plan.folder, plan.held)
    sizes: dict[str, Any] = {"workers": plan.workers, "bucket_bytes": plan.bucket_bytes, "timeout_s": plan.timeout_s}
    return GroupSender(plan.transport, host=host, rank=rank, **sizes)
