"""What episodes are run with; picklable, and free of heavy imports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from agentrl.config.schema import GROUP_ESTIMATORS, TrainConfig
from agentrl.core.types import Sampling, Trial
from agentrl.env.boundary import EnvLimits
from agentrl.env.isolation.limits import ProcessLimits
from agentrl.rollout.patience import Patience
from agentrl.rollout.penalties import LengthPenalties

EPISODES_PER_SEQUENCE = 4
"""Episodes to begin with for each sequence that an engine decodes at once: the others wait for their environments."""


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
        patience: How long a group waits for its last episodes; `None`: until they end.
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
    patience: Patience | None = None
    max_concurrent: int = 0
    start_concurrent: int = 1024

    def for_trial(self, trial: Trial | None) -> EpisodeSettings:
        """These settings with what `trial` changes."""
        if trial is None:
            return self
        temperature = self.sampling.temperature if trial.temperature is None else trial.temperature
        return replace(self, seed=trial.seed, sampling=replace(self.sampling, temperature=temperature))


def episode_settings(config: TrainConfig, model: str) -> EpisodeSettings:
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
        patience=patience(config),
        max_concurrent=rollout.max_concurrent_episodes,
        start_concurrent=EPISODES_PER_SEQUENCE * config.engine.max_num_seqs,
    )


def patience(config: TrainConfig) -> Patience | None:
    """How long a group waits for its last episodes; `None` if until they end."""
    flow = config.flow
    if flow.group_quorum == 1.0:
        return None
    least = 2 if config.algo.advantage_estimator in GROUP_ESTIMATORS else 1
    return Patience(quorum=flow.group_quorum, factor=flow.straggler_factor, least=least)


def process_limits(config: TrainConfig) -> ProcessLimits | None:
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
