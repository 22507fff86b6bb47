"""The plan of the processes of a run, decided before they start; picklable, and free of heavy imports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.cluster.plan import RunConfig, gpus_of
from agentrl.core.settings import files_renamed
from agentrl.engine.reward_model_facts import RewardModelSettings
from agentrl.engine.settings import Device, EngineSettings
from agentrl.learner.settings import LearnerSettings
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.suites.load import split_file
from agentrl.weights.plan import SenderPlan, WeightsConfig


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Everything that the processes of a run are made of; each is given all of it, and builds its own part (`agentrl.cluster.build`).

    Attributes:
        run: Section with the environment, the runtime, and the cluster to join.
        device: Kind of device that engines and learner ranks compute on.
        episodes: What rollout workers play by.
        engine: What engine number 0 is made of.
        judges: What each reward model is made of.
        learner: What a learner rank is made of; `None` if nothing is trained.
        sender: How weights go to the engines; `None` if nothing is trained.
        eval_engines: Engines for evaluations alone, whose numbers follow those of the others.
        most_workers: Rollout workers beside an engine that have enough to do; for ``--rollout-workers-per-engine auto``.
        run_dir: Directory that learner ranks write to.
    """

    run: RunConfig
    device: Device
    episodes: EpisodePlan
    engine: EngineSettings
    judges: tuple[RewardModelSettings, ...] = ()
    learner: LearnerSettings | None = None
    sender: SenderPlan | None = None
    eval_engines: int = 0
    most_workers: int = 1
    run_dir: Path | None = None

    @property
    def weights(self) -> WeightsConfig:
        """Section with the weights on their way to engines; the defaults where nothing is trained."""
        return self.engine.weights

    @property
    def joint(self) -> bool:
        """True if engines take weights together, in a group that they form with the learner."""
        return self.engine.transport != "shm"

    @property
    def num_engines(self) -> int:
        """Engines, those for evaluations among them."""
        return self.engine.engine.num_engines + self.eval_engines

    @property
    def num_ranks(self) -> int:
        """Learner ranks; 0 if nothing is trained."""
        return self.learner.learner.num_learners if self.learner else 0

    @property
    def gpus_for_judges(self) -> float:
        """GPUs that reward models take where there are some, each in a process of its own."""
        return len(self.judges) * self.episodes.reward.reward_model_gpus

    @property
    def needed_gpus(self) -> float:
        """GPUs that engines, learner ranks and reward models take where there are some."""
        colocated = self.num_ranks > 0 and self.weights.colocate
        reward, ranks = self.episodes.reward, self.num_ranks
        return gpus_of(self.engine.engine, reward, eval_engines=self.eval_engines, ranks=ranks, colocated=colocated)

    @property
    def num_front_ends(self) -> int:
        """Rollout workers beside each engine."""
        return self.episodes.rollout.num_front_ends

    def placed(self, cores: int) -> ClusterPlan:
        """Return the plan with a number in place of ``--rollout-workers-per-engine auto``.

        Args:
            cores: Those of the machine or cluster, which engines, learner ranks and reward models have one each of, too.
        """
        if self.episodes.rollout.rollout_workers_per_engine != "auto":
            return self
        engines = self.engine.engine.num_engines
        others = engines + self.num_ranks + len(self.judges)
        workers = max(1, min(self.most_workers, (cores - others) // engines))
        rollout = replace(self.episodes.rollout, rollout_workers_per_engine=workers)
        return replace(self, episodes=replace(self.episodes, rollout=rollout))

    def with_files(self, renamed: Callable[[Path], str]) -> ClusterPlan:
        """Return the plan with other names of the user's files that its processes import."""

        def named(spec: str) -> str:
            file, name = split_file(spec)
            if file is None or file.suffix != ".py":
                return spec
            return f"{renamed(file)}:{name}" if name else renamed(file)

        engine = replace(self.engine, engine=files_renamed(self.engine.engine, named))
        episodes, learner, reward = self.episodes, self.learner, self.episodes.group_reward
        if reward is not None:
            episodes = replace(episodes, group_reward=replace(reward, name=named(reward.name)))
        if learner is not None:
            learner = replace(learner, algo=files_renamed(learner.algo, named))
        return replace(self, run=replace(self.run, agent=named(self.run.agent)), engine=engine, episodes=episodes, learner=learner)
