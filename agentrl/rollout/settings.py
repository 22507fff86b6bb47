"""What episodes are run with; picklable, and free of heavy imports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from agentrl.algo.advantages import estimator_facts
from agentrl.config.evaluate import PlayConfig
from agentrl.config.schema import TrainConfig
from agentrl.core.types import EvalSampling, Sampling
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.limits import ProcessLimits
from agentrl.rollout.penalties import LengthPenalties

EPISODES_PER_SEQUENCE = 4
"""Episodes to begin with for each sequence that an engine decodes at once: the others wait for their environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerPolicy:
    """When a group is closed without the rest.

    Attributes:
        quorum: Share of the episodes that have to have ended well.
        factor: How many times their median the others may take.
        least: Episodes that have to have ended well in any case.
    """

    quorum: float
    factor: float
    least: int = 1

    def deadline_s(self, ended_s: Sequence[float], n_samples_per_prompt: int) -> float | None:
        """Seconds after the start of the group at which the rest is withheld; `None` while too few have ended well.

        Args:
            ended_s: What those that ended well took, seconds.
            n_samples_per_prompt: Episodes of the group.
        """
        if len(ended_s) < max(self.least, math.ceil(self.quorum * n_samples_per_prompt)):
            return None
        return self.factor * median(ended_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """Settings of the episodes of a run.

    Attributes:
        model: Hugging Face directory or hub name whose tokenizer is used.
        trust_remote_code: Allow the model's own Python code to run.
        seed: Seed of the run.
        sampling: How the first turn is sampled; its `max_tokens` is the budget of one turn.
        max_turns: Turns of an episode at most.
        max_episode_tokens: Tokens of an episode at most, prompt and observations included; 0: the context length.
        episode_timeout_s: Deadline of a whole episode.
        env: Deadlines and threads of user code.
        apply_chat_template: Render a plain-text prompt as one user message.
        system_prompt: System message put before a chat that does not begin with one.
        penalties: What an episode pays for its length.
        straggler_policy: How long a group waits for its last episodes; `None`: until they end.
        max_concurrent: Episodes under way at once beside one engine; 0 follows its load.
        start_concurrent: Where the number begins if it follows the load.
    """

    model: str
    trust_remote_code: bool = False
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    max_turns: int = 8
    max_episode_tokens: int = 0
    episode_timeout_s: float = 1800.0
    env: EnvLimits = field(default_factory=EnvLimits)
    apply_chat_template: bool = True
    system_prompt: str = ""
    penalties: LengthPenalties = field(default_factory=LengthPenalties)
    straggler_policy: StragglerPolicy | None = None
    max_concurrent: int = 0
    start_concurrent: int = 1024

    def for_eval_sampling(self, eval_sampling: EvalSampling | None) -> EpisodeSettings:
        """These settings with what `eval_sampling` changes."""
        if eval_sampling is None:
            return self
        temperature = self.sampling.temperature if eval_sampling.temperature is None else eval_sampling.temperature
        return replace(self, seed=eval_sampling.seed, sampling=replace(self.sampling, temperature=temperature))


def episode_settings(config: PlayConfig, model: str) -> EpisodeSettings:
    """The part of the configuration that episodes need.

    Args:
        config: The resolved configuration.
        model: Directory or hub name of the initial policy.
    """
    rollout = config.rollout
    return EpisodeSettings(
        model=model,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.run.seed,
        sampling=Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_new_tokens,
            stop=rollout.stop,
        ),
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        episode_timeout_s=rollout.episode_timeout_s,
        env=EnvLimits(
            reset_timeout_s=rollout.reset_timeout_s,
            step_timeout_s=rollout.step_timeout_s,
            threads=rollout.env_threads,
            process=process_limits(config),
        ),
        apply_chat_template=config.data.apply_chat_template,
        system_prompt=config.data.system_prompt,
        penalties=LengthPenalties(
            overlong_buffer=config.algo.overlong_buffer,
            overlong_factor=config.algo.overlong_penalty,
            stop_properly=config.algo.stop_properly_penalty,
        ),
        straggler_policy=straggler_policy(config) if isinstance(config, TrainConfig) else None,
        max_concurrent=rollout.max_concurrent_episodes,
        start_concurrent=EPISODES_PER_SEQUENCE * config.engine.max_num_seqs,
    )


def straggler_policy(config: TrainConfig) -> StragglerPolicy | None:
    """How long a group waits for its last episodes; `None` if until they end."""
    flow = config.flow
    if flow.group_quorum == 1.0:
        return None
    least = 2 if estimator_facts(config.algo.advantage_estimator).compares_group else 1
    return StragglerPolicy(quorum=flow.group_quorum, factor=flow.straggler_factor, least=least)


def process_limits(config: PlayConfig) -> ProcessLimits | None:
    """What the process of an episode may use; `None` if episodes run in the rollout worker's."""
    isolation = config.isolation
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
