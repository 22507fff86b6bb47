"""The sections of the configuration that episodes read, and the values that follow from them; picklable, and free of heavy imports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from agentrl.algo.estimators import estimator_facts
from agentrl.algo.plan import bootstraps, has_ratios
from agentrl.algo.teacher_specs import TeachingSettings, served_teachers
from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed, sections_of
from agentrl.core.types import EvalSampling, GroupRequest, Sampling
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.plan import IsolationConfig
from agentrl.env.results import bad_result
from agentrl.env.sandbox.spec import SandboxChoice
from agentrl.rollout.group_rewards import GroupRewardSettings
from agentrl.rollout.partner_specs import partner_specs
from agentrl.rollout.plan import SamplingConfig

TRUNCATED = (
    "truncated sampling biases the importance ratio of the turn; leave it out, or train with --off-policy none "
    "and without --reuse-behaviour-logprobs"
)
PARTNERS = "partners"
"""Folder of a run directory with earlier weights that play agents."""
EPISODES_PER_SEQUENCE = 4
"""Episodes to begin with for each sequence that an engine decodes at once: the others wait for their environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """Conditions under which a group is closed without its late episodes."""

    quorum: float  # share of the episodes that must have ended well
    factor: float  # time that the others may take, as a multiple of the median of those episodes
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
class EpisodeSettings(PlaySettings):
    """Sections of a command that bear on episodes, and what else the command says of them.

    Attributes:
        temperature: Sampling temperature.
        is_training: True if something is learned from these episodes.
        weighs_ratios: True if they are trained with importance ratios.
        straggler_policy: Limit of a group's wait for its last episodes; `None` if it waits until they end.
        close_timeout_s: Deadline of an environment's `close`, seconds.
        run_name: Directory of the run, which containers bear as a label.
        group_reward: Reward that sees whole groups; `None` without one.
        partner_folder: Directory with earlier weights of the run, which agents are played by with ``--partner NAME=past``; empty: the
            policy plays them.
        teaching: Served teachers, which score what is to be trained; `None` without one.
        hint_template: File of ``--teacher-template``; empty without one.
        forks: Where the episodes of a group part; `None` if each is played from its beginning.
        keeps_unread: True if an episode that is cut short keeps what it would have read next, for the value of a critic.
    """

    temperature: float = 1.0
    is_training: bool = False
    weighs_ratios: bool = False
    straggler_policy: StragglerPolicy | None = None
    close_timeout_s: float = 10.0
    run_name: str = ""
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
            temperature=self.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
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
            max_starting=chosen.sandbox_max_starting,
            max_running=chosen.sandbox_max_running,
            places=(self.run_name or repr(self.run)) if chosen.sandbox_max_running else "",  # the same in all workers
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
        return EPISODES_PER_SEQUENCE * self.engine.max_num_seqs // self.rollout.num_front_ends

    def for_member(self, group_request: GroupRequest, index: int) -> EpisodeSettings:
        """Return the settings with what the group request changes for the episode of that number; the one behind the members is greedy."""
        settings = self.for_eval_sampling(group_request.eval_sampling)
        if index < group_request.n_samples_per_prompt:
            return settings
        return replace(settings, is_training=False, temperature=0.0)

    def for_eval_sampling(self, eval_sampling: EvalSampling | None) -> EpisodeSettings:
        """Return the settings with what `eval_sampling` changes."""
        if eval_sampling is None:
            return self
        temperature = self.temperature if eval_sampling.temperature is None else eval_sampling.temperature
        return replace(self, run=replace(self.run, seed=eval_sampling.seed), is_training=False, temperature=temperature)


def episode_settings(config: PlaySettings, model: str) -> EpisodeSettings:
    """Return the settings of the episodes of a command; `model` is the directory or hub name of the initial policy."""
    own: dict[str, Any] = {"temperature": temperature_of(config)}
    if isinstance(config, TrainConfig):
        own |= {"is_training": True, "weighs_ratios": has_ratios(config.algo), "straggler_policy": _straggler_policy(config)}
        own["run_name"] = str(config.training.run_dir or "")
        own |= {"group_reward": _group_reward(config), "partner_folder": partner_folder(config)}
        own |= {"forks": fork_settings(config), "keeps_unread": bootstraps(config.algo)}
        own |= {"teaching": teaching_settings(config), "hint_template": config.algo.teacher_template}
    sections = {name: getattr(config, name) for name in sections_of(PlaySettings)}
    return changed(EpisodeSettings(**sections, **own), model=model)


def temperature_of(config: PlaySettings) -> float:
    """Return the sampling temperature of a command."""
    if isinstance(config, EvaluateConfig):
        return 1.0 if config.eval.eval_temperature is None else config.eval.eval_temperature
    sampling: SamplingConfig = getattr(config, "sampling", SamplingConfig())
    return sampling.temperature


def _straggler_policy(config: TrainConfig) -> StragglerPolicy | None:
    if config.flow.group_quorum == 1.0:
        return None
    least = 2 if estimator_facts(config.algo.advantage_estimator).compares_group else 1
    return StragglerPolicy(quorum=config.flow.group_quorum, factor=config.flow.straggler_factor, least=least)


def partner_folder(config: TrainConfig) -> str:
    """Return the directory of earlier weights that agents are played by; empty if none are."""
    if config.training.run_dir is None or not any(spec.kind == "past" for spec in partner_specs(config.partner)):
        return ""
    return str(config.training.run_dir.absolute() / PARTNERS)


def teaching_settings(config: TrainConfig) -> TeachingSettings | None:
    """Return the settings of the served teachers of a run; `None` if there are none."""
    algo = config.algo
    specs = served_teachers(algo.teacher)
    top_k = 1 if algo.teacher_loss == "sampled" else algo.teacher_top_k
    return TeachingSettings(specs=specs, top_k=top_k, by=algo.teacher_by, timeout_s=config.rollout.reward_timeout_s) if specs else None


def _group_reward(config: TrainConfig) -> GroupRewardSettings | None:
    flow, timeout_s = config.flow, config.rollout.reward_timeout_s
    replaces, weight = flow.group_reward_mode == "replace", flow.group_reward_weight
    return GroupRewardSettings(name=flow.group_reward, weight=weight, replaces=replaces, timeout_s=timeout_s) if flow.group_reward else None


def fork_settings(config: TrainConfig) -> ForkSettings | None:
    """Return the settings of the forks of a run; `None` if nothing is forked."""
    flow, at = config.flow, config.flow.branch_at
    return None if at == "never" else ForkSettings(at=at, branches=flow.branches, entropy=flow.branch_entropy)


def process_limits(isolation: IsolationConfig) -> ProcessLimits | None:
    """Return the limits of an episode's process; `None` if episodes run in the process of the rollout worker."""
    if isolation.env_isolation == "none":
        return None
    return ProcessLimits(
        memory_mib=isolation.env_memory_mib,
        cpu_s=isolation.env_cpu_s,
        file_mib=isolation.env_file_mib,
        processes=isolation.env_processes,
        open_files=isolation.env_open_files,
        reuse=isolation.env_reuse,
        passed=isolation.env_pass,
    )
