"""The plan that episodes are played by: sections of settings and the values that follow from them; picklable, and free of heavy imports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from agentrl.algo.teacher_specs import TeachingSettings
from agentrl.core.types import EvalSampling, GroupRequest, Sampling
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.plan import DataConfig, ImageConfig, IsolationConfig, SandboxConfig
from agentrl.env.results import bad_result
from agentrl.env.sandbox.spec import SandboxChoice
from agentrl.rollout.group_rewards import GroupRewardSettings
from agentrl.rollout.plan import EndpointConfig, ModelConfig, PartnerConfig, PenaltyConfig, RewardConfig, RolloutConfig

TRUNCATED = (
    "truncated sampling biases the importance ratio of the turn; leave it out, or train with --off-policy none "
    "and without --old-logprobs behaviour"
)
PARTNERS = "partners"
"""Folder of a run directory with earlier weights that play agents."""
EPISODES_PER_SEQUENCE = 4
"""Episodes to begin with for each sequence that an engine decodes at once: the others wait for their environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """Conditions under which a group is closed without its late episodes."""

    quorum: float  # share of the episodes that must have ended well
    factor: float = 3.0  # time that the others may take, as a multiple of the median of those episodes
    least: int = 1  # episodes that must have ended well in any case

    def deadline_s(self, ended_s: Sequence[float], n_samples_per_prompt: int) -> float | None:
        """Seconds after the start of the group at which the rest is cancelled; `None` while too few of its episodes have ended well."""
        if len(ended_s) < max(self.least, math.ceil(self.quorum * n_samples_per_prompt)):
            return None
        return self.factor * median(ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSettings:
    """Settings of forks: where the episodes of a group part."""

    at: int | Literal["entropy"]  # number of the turn that each continuation samples for itself
    branches: int  # episodes with the same turns before, the one played from its beginning included
    entropy: float = 0.0  # nats per token above the first turn


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """Everything that decides how episodes go: sections as they are, and what else a command says of its episodes.

    Attributes:
        model: Section with the model of the policy, the bundled one filled in.
        seed: Seed of tasks and turns.
        temperature: Sampling temperature.
        is_training: True if something is learned from these episodes.
        weighs_ratios: True if they are trained with importance ratios.
        max_num_seqs: Sequences that the engine decodes at once, if it is asked for a number.
        straggler_policy: Limit of a group's wait for its last episodes; `None` if it waits until they end.
        close_timeout_s: Deadline of an environment's `close`, seconds.
        run_name: Directory of the run, which containers bear as a label.
        places: Name under which all workers of a run count its sandboxes together.
        group_reward: Reward that sees whole groups; `None` without one.
        partner_folder: Directory with earlier weights of the run, which agents are played by with ``--partner NAME=past``; empty: the
            policy plays them.
        teaching: Served teachers, which score what is to be trained; `None` without one.
        hint_template: File of ``--teacher-template``; empty without one.
        forks: Where the episodes of a group part; `None` if each is played from its beginning.
        keeps_unread: True if an episode that is cut short keeps what it would have read next, for the value of a critic.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    images: ImageConfig = field(default_factory=ImageConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    penalty: PenaltyConfig = field(default_factory=PenaltyConfig)
    partner: PartnerConfig = field(default_factory=PartnerConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    seed: int = 0
    temperature: float = 1.0
    is_training: bool = False
    weighs_ratios: bool = False
    max_num_seqs: int = 0
    straggler_policy: StragglerPolicy | None = None
    close_timeout_s: float = 10.0
    run_name: str = ""
    places: str = ""
    group_reward: GroupRewardSettings | None = None
    partner_folder: str = ""
    teaching: TeachingSettings | None = None
    hint_template: str = ""
    forks: ForkSettings | None = None
    keeps_unread: bool = False

    @property
    def sampling(self) -> Sampling:
        """Settings of the first turn; `max_tokens` is the budget of one turn."""
        rollout = self.rollout
        return Sampling(
            temperature=self.temperature, top_p=rollout.top_p, top_k=rollout.top_k, max_tokens=rollout.max_new_tokens, stop=rollout.stop
        )

    def changed_sampling(self, sampling: Sampling, given: Mapping[str, Any], where: str) -> Sampling:
        """Return `sampling` with what user code, the method `where`, gave for the turns that follow.

        Raises:
            EnvResultError: If these turns are trained with importance ratios, and would not be sampled from the whole distribution.
        """
        found = replace(sampling, **given)
        if self.is_training and self.weighs_ratios:
            for name, value, whole in (("top_p", found.top_p, 1.0), ("top_k", found.top_k, 0)):
                if name in given and value != whole:
                    raise bad_result(where, f"sampling[{name!r}]", value, TRUNCATED)
        return found

    @property
    def env(self) -> EnvLimits:
        """Deadlines and threads of user code."""
        return EnvLimits(
            reset_timeout_s=self.rollout.reset_timeout_s,
            step_timeout_s=self.rollout.step_timeout_s,
            close_timeout_s=self.close_timeout_s,
            threads=self.rollout.env_threads,
            process=process_limits(self.isolation),
            sandbox=self.sandbox_choice,
            mcp=self.sandbox.mcp,
            copied=self.forks is not None,
        )

    @property
    def sandbox_choice(self) -> SandboxChoice:
        """Settings of the sandboxes of programs."""
        chosen = self.sandbox
        return SandboxChoice(
            kind=chosen.sandbox,
            image=chosen.sandbox_image,
            read=chosen.sandbox_read,
            run=self.run_name,
            url=chosen.sandbox_url,
            network=chosen.sandbox_network,
            max_running=chosen.sandbox_max_running,
            places=self.places if chosen.sandbox_max_running else "",
        )

    @property
    def program_limits(self) -> ProcessLimits | None:
        """Limits of the programs that an agent starts, which always run in processes of their own."""
        return process_limits(replace(self.isolation, env_isolation="process"))

    @property
    def max_concurrent(self) -> int:
        """Episodes under way at once in one of the engine's rollout workers; 0: their number follows the engine's load."""
        limit = self.rollout.max_concurrent_episodes
        return max(1, limit // self.rollout.num_front_ends) if limit else 0

    @property
    def start_concurrent(self) -> int:
        """Episodes under way at once to begin with, if their number follows the engine's load."""
        return EPISODES_PER_SEQUENCE * self.max_num_seqs // self.rollout.num_front_ends

    def for_member(self, group_request: GroupRequest, index: int) -> EpisodePlan:
        """Return the settings with what the group request changes for the episode of that number; the one behind the members is greedy."""
        settings = self.for_eval_sampling(group_request.eval_sampling)
        if index < group_request.n_samples_per_prompt:
            return settings
        return replace(settings, is_training=False, temperature=0.0)

    def for_eval_sampling(self, eval_sampling: EvalSampling | None) -> EpisodePlan:
        """Return the settings with what `eval_sampling` changes."""
        if eval_sampling is None:
            return self
        temperature = self.temperature if eval_sampling.temperature is None else eval_sampling.temperature
        return replace(self, seed=eval_sampling.seed, is_training=False, temperature=temperature)

    def with_model(self, model: str) -> EpisodePlan:
        """Return the plan with another model's directory or hub name."""
        return replace(self, model=replace(self.model, model=model))

    def for_part(self) -> EpisodePlan:
        """Return the plan of an episode that an executor plays as a part of its own, which has its own limit and pays the penalties."""
        return replace(
            self,
            rollout=replace(self.rollout, max_episode_tokens=0),
            data=replace(self.data, apply_chat_template=False),
            penalty=replace(self.penalty, overlong_buffer=0, stop_properly_penalty=None),
        )


def process_limits(isolation: IsolationConfig) -> ProcessLimits | None:
    """Return the limits of an episode's process; `None` if episodes run in the process of the rollout worker."""
    if isolation.env_isolation == "none":
        return None
    return replace(ProcessLimits(reuse=isolation.env_reuse, passed=isolation.env_pass), **isolation.limits)
