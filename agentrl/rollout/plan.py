"""Settings of episodes: budgets and deadlines, attempts at a task, the model and its endpoint, rewards of models, and partners."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from agentrl.assets import located_model
from agentrl.core.process import LOOPBACK
from agentrl.core.settings import Alias, Count, CountOrZero, NonNegative, Port, Positive, ResumeMayChange, Share, Temperature


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets, sampling and deadlines of episodes."""

    max_turns: Count = 8
    """Turns of an episode at most; then it is truncated."""
    max_new_tokens: Count = 128
    """Tokens sampled in one turn at most. By model, unless given: 1024 from 5e8 parameters."""
    max_episode_tokens: CountOrZero = 0
    """Tokens of a whole episode at most, prompt and observations included; 0: the context length."""
    top_p: Share = 1.0
    """Nucleus sampling mass; below 1 the importance ratio is biased and a correction is refused."""
    top_k: CountOrZero = 0
    """Candidates kept for sampling; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, beside the model's end token."""
    reset_timeout_s: Annotated[Positive, ResumeMayChange] = 60.0
    """Deadline of one call of the environment's ``reset``."""
    step_timeout_s: Annotated[Positive, ResumeMayChange] = 60.0
    """Deadline of one call of the environment's ``step``."""
    episode_timeout_s: Annotated[Positive, ResumeMayChange] = 1800.0
    """Deadline of a whole episode."""
    reward_timeout_s: Positive = 45.0
    """Deadline of an answer of ``--remote-rm-url``, further attempts included, and of the scores of ``--reward-model``."""
    max_concurrent_episodes: Annotated[CountOrZero, ResumeMayChange] = 0
    """Episodes under way at once beside one engine; whole groups are held back, the oldest first to begin. 0 follows the load of the
    engine: its KV cache and its queue."""
    rollout_workers_per_engine: Annotated[Count | Literal["auto"], ResumeMayChange] = "auto"
    """Processes with episodes for each engine. 1: the engine's own. More: the engine has a process to itself, and they are placed on any
    machine with a free CPU. ``auto``: one for every 1,000 episodes under way at once, as far as there are cores."""
    env_threads: Annotated[Count, ResumeMayChange] = 32
    """Threads per worker for environments written with plain ``def`` methods."""

    @property
    def num_front_ends(self) -> int:
        """Processes with episodes for each engine; 1, the engine's own, where ``auto`` has not become a number."""
        return 1 if self.rollout_workers_per_engine == "auto" else self.rollout_workers_per_engine


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Attempts at a task, and their sampling temperature."""

    n_samples_per_prompt: Count = 8
    """Episodes per task; a group estimator needs at least 2."""
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.01 to 2; log-probabilities are those of the tempered distribution."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The HTTP endpoint that black-box agents talk to; other environments do not use it."""

    max_requests: Count = 1000
    """Requests of one episode that are answered; later ones are refused, and the episode is truncated."""
    train_branches: str = "all"
    """Branches of an episode that are trained: ``all``, ``agent`` (all but those of helpers, such as titles and summaries), ``final``
    (that of the last answer which can be trained), or names with commas."""
    forced_forms: Literal["hold", "free"] = "hold"
    """Answers whose form a request forces (a JSON schema, a tool call): ``hold`` them to it, untrained; or leave them ``free``, trained."""
    tool_parser: str = "auto"
    """Parser of tool calls: ``json`` (in ``<tool_call>`` tags or bare), or the name of one of vLLM's, as its ``--tool-call-parser``.
    ``auto``: the first of these that reads the calls which the chat template writes, else ``json``.
    """
    reasoning_parser: str = ""
    """Parser of reasoning: the name of one of vLLM's. Empty: reasoning is what stands before ``</think>``."""
    record_requests: Annotated[bool, ResumeMayChange] = False
    """Write the requests of the episodes that ``--record`` records to ``requests.jsonl``; ``agentrl replay`` drives them again."""
    endpoint_host: Annotated[str, ResumeMayChange] = LOOPBACK
    """Address at which the endpoint listens; ``0.0.0.0`` lets agents in containers and on other machines reach it."""
    endpoint_port: Annotated[Port, ResumeMayChange, Alias("--port", command="serve")] = 0
    """Port of the endpoint; 0: a free one. Rollout workers of one machine take this port and those behind it."""
    endpoint_url: Annotated[str, ResumeMayChange] = ""
    """Address that agents are given; ``{host}`` and ``{port}`` stand for those of the rollout worker. Empty: ``http://{host}:{port}``."""
    endpoint_certificate: Annotated[str, ResumeMayChange] = ""
    """File with a certificate and its private key (PEM); the endpoint then speaks HTTPS."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    model: str = ""
    """Hugging Face directory or hub name. Empty: the tiny chat model that ships with agentrl; ``tiny-vision``: that which reads images."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""
    chat_template: str = ""
    """File of a Jinja chat template to use instead of the one that comes with the model's tokenizer."""
    chat_template_kwargs: str = ""
    """Variables for the chat template, as a JSON object: ``{"reasoning_effort": "low"}``."""
    thinking: Literal["auto", "on", "off", "keep"] = "auto"
    """``on`` and ``off`` set the chat template's own switch for thinking, ``keep`` the one that keeps the thinking of earlier turns in the
    prompt; refused for a template without such a switch. ``auto``: as the template does by itself."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", located_model(self.model))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards from trained models."""

    reward_model: tuple[str, ...] = ()
    """Models that judge episodes, Hugging Face directories or hub names: sequence classifiers with one output, which score the whole
    episode, or process reward models, which score each turn. Their rewards are added to the environment's."""
    reward_model_weights: tuple[float, ...] = ()
    """Factor of each of ``--reward-model``, in their order. Empty: 1 for each."""
    environment_reward_weight: float = 1.0
    """Factor of the environment's own reward beside ``--reward-model`` or ``--group-reward``; with 0 it is only measured, as ``env/reward``
    and as score."""
    normalize_reward: bool = False
    """Subtract the running mean of each model's scores and divide by their running standard deviation, over the steps trained so far. After
    that, and before they are weighted, scores are cut at 10 and -10."""
    process_reward_at: Literal["turn", "step"] = "turn"
    """Token at which the reward of a process reward model is paid: the last of the ``turn``, or the last of its worst ``step``, so that
    what comes after is not blamed for it."""
    reward_model_gpus: NonNegative = 1.0
    """GPUs of each of these processes, or a share of one, as 0.25; without effect where there are none."""

    @property
    def weights(self) -> tuple[float, ...]:
        """A factor for each model."""
        return self.reward_model_weights or (1.0,) * len(self.reward_model)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each model, for metrics: the last part of its path, with a number where two are the same."""
        last = [Path(model).name or model for model in self.reward_model]
        return tuple(name if last.count(name) == 1 else f"{name}-{index}" for index, name in enumerate(last))


@dataclass(frozen=True, kw_only=True)
class PenaltyConfig:
    """Rewards of episodes that are too long."""

    overlong_buffer: CountOrZero = 0
    """Tokens before ``--max-new-tokens`` over which a turn's penalty for length grows to ``--overlong-penalty`` (DAPO); 0: no penalty."""
    overlong_penalty: NonNegative = 1.0
    """Reward taken away from a turn that uses up all of ``--max-new-tokens``, if ``--overlong-buffer`` is set."""
    stop_properly_penalty: float | None = None
    """For an episode cut by a token limit: at least 0 multiplies its reward, below 0 replaces it. Scores do not change."""

    @property
    def changes_rewards(self) -> bool:
        """True if one of the penalties is on."""
        return bool(self.overlong_buffer) or self.stop_properly_penalty is not None


@dataclass(frozen=True, kw_only=True)
class PartnerConfig:
    """Agents that the policy does not play."""

    partner: tuple[str, ...] = ()
    """Agents that the policy does not play, and who does: ``NAME=past``, earlier weights of this run (self-play), kept after each 50 steps,
    of which one of the newest 4 is drawn for each group (``NAME=past#every=50&pool=4``; at first the model to begin with is one of them);
    ``NAME=model:DIR``, another model; ``NAME=endpoint:URL#model=M``, a service like OpenAI's. They are not trained."""
