"""Settings of the processes of a run: what they play, where they are, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from agentrl.core.errors import ConfigError
from agentrl.core.settings import CountOrZero, NonNegative, Positive, ResumeMayChange
from agentrl.engine.plan import EngineConfig
from agentrl.rollout.plan import RewardConfig
from agentrl.suites.registry import scheme_of

FEWER_GPUS = """Lower --num-engines, --eval-engines, --tensor-parallel-size, --num-learners or --reward-model-gpus, \
or share GPUs with --colocate."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The environment, the seed, and the processes of a run."""

    agent: str = ""
    """Environment or reward to train on: ``file.py``, ``file.py:Name``, ``package.module:Name``, ``gym:ID``; or ``--remote-rm-url``."""
    observe: Literal["text", "pixels"] = "text"
    """Observations of ``--agent gym:ID``: ``text``, or ``pixels``, the pictures of its ``render_mode`` ``rgb_array``."""
    seed: CountOrZero = 0
    """Seed of the whole run: order of tasks, sampling, initialisation of new layers."""
    runtime: Annotated[Literal["auto", "ray", "local"], ResumeMayChange] = "auto"
    """``ray`` runs engines and learner ranks as Ray actors; ``local`` runs the same classes in this process, for debugging. ``auto``:
    ``ray`` for training, and elsewhere ``local`` for one engine."""
    device: Annotated[Literal["auto", "cpu", "cuda"], ResumeMayChange] = "auto"
    """Kind of device that engines and learner compute on. ``auto``: GPUs where there are any; a cluster that is joined (``--ray-address``)
    must have some."""
    ray_address: Annotated[str, ResumeMayChange] = ""
    """Ray cluster to join (``auto`` or ``host:port``). Empty starts a private cluster on loopback."""
    cluster_timeout_s: Annotated[NonNegative, ResumeMayChange] = 120.0
    """Seconds that a cluster which is joined has for its machines to come, until it has the GPUs and CPUs that the run asks for."""
    stall_timeout_s: Annotated[Positive, ResumeMayChange] = 600.0
    """Stop with a diagnosis if no group finishes and no step ends for this many seconds."""
    debug: Annotated[bool, ResumeMayChange] = False
    """Show tracebacks and the output of worker processes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "agent", observing(self.agent, self.observe))


def gpus_of(engine: EngineConfig, reward: RewardConfig, *, eval_engines: int = 0, ranks: int = 0, colocated: bool = False) -> float:
    """Return the GPUs that engines, learner ranks and reward models take where there are some."""
    engines = 0 if colocated else (engine.num_engines + eval_engines) * engine.gpus_per_engine
    return engines + ranks + len(reward.reward_model) * reward.reward_model_gpus


def observing(agent: str, observe: str) -> str:
    """Return the name of an environment with what it is to show the model, ``text`` or ``pixels``.

    Raises:
        ConfigError: If pictures are asked for, and it is no environment of gymnasium.
    """
    if observe == "text" or not agent or "observe=" in agent.partition("?")[2]:
        return agent
    if not scheme_of(agent).has_pictures:
        remedy = 'In a class of yours that inherits from GymEnv write observe = "pixels"; other environments return images themselves.'
        raise ConfigError("--observe", observe, f"is for gym:ID, and --agent is {agent!r}", remedy)
    return f"{agent}{'&' if '?' in agent else '?'}observe={observe}"
