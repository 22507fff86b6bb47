"""Settings of episodes: their budgets and deadlines, attempts at a task, processes of environments, the endpoint of black-box agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from agentrl.core.process import LOOPBACK
from agentrl.core.settings import Alias, Count, CountOrZero, Port, Positive, ResumeMayChange, Share, Temperature


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets, sampling and deadlines of episodes."""

    max_turns: Count = 8
    """Turns of an episode at most; then it is truncated."""
    max_new_tokens: Annotated[Count, Alias("--max-completion-length", "--generate-max-len")] = 128
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
    reward_batch_size: Count = 64
    """Episodes whose answers go to ``--remote-rm-url`` in one request at most, or through a ``--reward-model`` at once."""
    max_concurrent_episodes: Annotated[CountOrZero, ResumeMayChange] = 0
    """Episodes under way at once beside one engine; whole groups are held back, the oldest first to begin. 0 follows the load of the
    engine: its KV cache and its queue."""
    rollout_workers_per_engine: Annotated[Count | Literal["auto"], ResumeMayChange] = "auto"
    """Processes with episodes for each engine. 1: the engine's own. More: the engine has a process to itself, and they are placed on any
    machine with a free CPU. ``auto``: one for every 1,000 episodes under way at once, as far as there are cores."""
    env_threads: Annotated[Count, ResumeMayChange] = 32
    """Threads per worker for environments written with plain ``def`` methods."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Attempts at a task, and their sampling temperature."""

    n_samples_per_prompt: Annotated[Count, Alias("--num-generations")] = 8
    """Episodes per task; a group estimator needs at least 2."""
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.01 to 2; log-probabilities are those of the tempered distribution."""


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """Processes of environments, one per episode. Limits of what each may use stop accidents, not attackers."""

    env_isolation: Literal["none", "process"] = "none"
    """``process`` plays every episode in a process of its own; ``none`` in the rollout worker."""
    env_memory_mib: Count = 1024
    """Memory of an episode beyond what importing the file took, MiB."""
    env_cpu_s: Positive = 600.0
    """CPU seconds of an episode."""
    env_file_mib: Count = 256
    """Size of a file that an episode writes, MiB."""
    env_processes: CountOrZero = 32
    """Processes that an episode may have started and that still run."""
    env_open_files: Annotated[int, Ge(16)] = 512
    """Open files and sockets of an episode."""
    env_pass: tuple[str, ...] = ()
    """Names of environment variables that an episode is given besides ``PATH``, ``HOME``, ``LANG``, ``PYTHON*`` and the like."""
    env_reuse: Count = 1
    """Episodes that a process plays one after another; 1 begins each in the state that importing the file left."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The HTTP endpoint that black-box agents talk to; other environments do not use it."""

    max_requests: Count = 1000
    """Requests of one episode that are answered; later ones are refused, and the episode is truncated."""
    train_branches: str = "all"
    """Branches of an episode that are trained: ``all``, ``agent`` (all but those of helpers, such as titles and summaries), ``final``
    (that of the last answer which can be trained), or names with commas."""
    train_cancelled: bool = False
    """Train what was sampled of streamed answers whose client left after their first token; else it is recorded as ``cancelled``."""
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
