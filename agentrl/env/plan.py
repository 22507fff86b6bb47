"""Settings that environments are made of: their tasks, the images they show, their processes, sandboxes and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from agentrl.core.errors import ConfigError
from agentrl.core.named_args import parse_named_args
from agentrl.core.sandboxes import DEFAULT_IMAGE
from agentrl.core.settings import Alias, Count, CountOrZero, ResumeMayChange, listed

LEAST_LIMITS: Mapping[str, float] = MappingProxyType({"memory_mib": 1, "cpu_s": 1e-3, "file_mib": 1, "processes": 0, "open_files": 16})
"""Limits of ``--env-limits``, with their smallest values."""
ANSWER = "answer:"
"""Specification of the environment that ends after one answer and leaves the reward to ``--reward-model``."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tasks to train and to evaluate on."""

    prompts: str = ""
    """JSONL, CSV or Parquet file, folder of such files, or Hugging Face data set (``name`` or ``name@configuration``); several with commas
    between them. Empty: the environment's own ``tasks()``."""
    prompt_probs: str = ""
    """Proportions in which to draw from several ``--prompts``: ``0.7,0.3``. Empty: they are one collection."""
    prompt_split: str = "train"
    """Split to load when ``--prompts`` names a Hugging Face data set, or a folder whose files are named after their splits."""
    eval_prompts: str = ""
    """Tasks to evaluate on, in the same forms as ``--prompts``. Empty: the environment's own ``eval_tasks()``, else ``--eval-size``."""
    eval_split: str = "test"
    """The same for ``--eval-prompts``."""
    eval_size: Annotated[CountOrZero, Alias("--num-tasks", command="eval")] = 0
    """Tasks to evaluate on: of ``--eval-prompts`` or ``eval_tasks()`` at most so many (0: all), else so many held out of the training
    tasks, chosen by the seed and never trained on."""
    input_key: str = "prompt"
    """Column that holds the prompt: text or chat messages. ``a.b``: the key ``b`` in column ``a``."""
    label_key: str = "label"
    """Column that holds the label, also as ``a.b``. Without a column ``label``: verl's ``reward_model.ground_truth`` or SkyRL's
    ``reward_spec.ground_truth``, else ``None``."""
    image_key: str = "images"
    """Column that holds the images of the prompt, a list of them or one; a data set may lack it."""
    input_template: str = ""
    """Text around each plain-text prompt of a data set, with ``{}`` in its place; ``{{`` and ``}}`` stand for braces."""
    apply_chat_template: bool = True
    """Render a plain-text prompt as one user message with the chat template; off: use the text as it is."""
    system_prompt: str = ""
    """System message put before every chat prompt."""
    remote_rm_url: Annotated[str, Alias("--reward")] = ""
    """Judge of single answers to ``--prompts``, without ``--agent``: URLs of reward servers with commas between, or a reward's file. With a
    program as ``--agent``, such as ``command:CMD``: the file of the reward function that judges what the program prints."""
    shuffle: bool = True
    """Draw tasks in an order derived from the seed and the epoch; off: in the given order."""

    @property
    def prompt_sources(self) -> tuple[str, ...]:
        """The data sets that `prompts` names."""
        return listed(self.prompts)

    @property
    def prompt_weights(self) -> tuple[float, ...]:
        """The numbers in `prompt_probs`."""
        return tuple(map(float, listed(self.prompt_probs)))

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """The data sets that `eval_prompts` names."""
        return listed(self.eval_prompts)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Images of prompts, for a model that reads them."""

    max_images: Count = 16
    """Images of a context, or of a row of given data, at most; an episode with more has failed, and a row with more is refused."""
    max_image_pixels: Count = 2**23
    """Pixels of an image at most; an episode with a larger one has failed, and a row with a larger one is refused."""
    allow_image_urls: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Hosts from which images are fetched by ``http`` or ``https``, each with its port if it has another one than that of the scheme:
    ``images.example.com``, ``localhost:8000``. Unset: addresses are refused."""

    def __post_init__(self) -> None:
        for host in self.allow_image_urls:
            if not host or urlsplit(f"//{host}").netloc != host or "@" in host:
                raise ConfigError("--allow-image-urls", host, "is no host", "Write images.example.com, or localhost:8000.")


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """Processes of environments, one per episode. Limits of what each may use stop accidents, not attackers."""

    env_isolation: Literal["none", "process"] = "none"
    """``process`` plays every episode in a process of its own; ``none`` in the rollout worker."""
    env_limits: tuple[str, ...] = ()
    """Limits of what an episode uses, as ``name=number``: ``memory_mib`` beyond what importing the file took (1024), ``cpu_s`` of CPU time
    (600), ``file_mib`` of a file that it writes (256), ``processes`` that it started (32), ``open_files`` and sockets (512)."""
    env_pass: tuple[str, ...] = ()
    """Names of environment variables that an episode is given besides ``PATH``, ``HOME``, ``LANG``, ``PYTHON*`` and the like."""
    env_reuse: Count = 1
    """Episodes that a process plays one after another; 1 begins each in the state that importing the file left."""

    def __post_init__(self) -> None:
        for name, value in parse_named_args(self.env_limits).items():
            least = LEAST_LIMITS.get(name)
            if least is None:
                raise ConfigError("--env-limits", name, "is no limit", f"Choose of {', '.join(LEAST_LIMITS)}.")
            whole = name != "cpu_s"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value < least:
                wanted = f"an integer from {least}" if whole else "a number above 0"
                raise ConfigError("--env-limits", f"{name}={value}", f"must be {wanted}", "Correct the value.")

    @property
    def limits(self) -> dict[str, Any]:
        """The limits in `env_limits`, by name."""
        given = parse_named_args(self.env_limits)
        return {name: float(value) if name == "cpu_s" else value for name, value in given.items()}


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Sandboxes of programs, and servers of tools."""

    sandbox: Annotated[Literal["local", "container", "remote", "none"], ResumeMayChange] = "local"
    """``local`` hides other processes, files and the network from programs, and needs bubblewrap; ``container`` runs them in containers of
    podman or docker; ``remote`` on a machine with ``agentrl serve-sandboxes``; ``none`` has limits only, and no wall."""
    sandbox_read: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Files and folders that the programs may read, besides those of the system and of Python, or of the image."""
    sandbox_image: Annotated[str, ResumeMayChange] = DEFAULT_IMAGE
    """Image of containers: a name, or the path of a Containerfile or of a folder with one, beginning with ``/`` or ``.``, built once."""
    sandbox_url: Annotated[str, ResumeMayChange] = ""
    """Address of a server of sandboxes, for ``--sandbox remote``; its key is read from the environment variable ``AGENTRL_SANDBOX_KEY``."""
    sandbox_network: Annotated[Literal["endpoint", "all"], ResumeMayChange] = "endpoint"
    """Network of programs that are agents, such as ``command:CMD``, behind a wall: the model's endpoint, or all that this machine
    reaches."""
    sandbox_max_running: Annotated[CountOrZero, ResumeMayChange] = 0
    """Sandboxes of the run that are open at a time on a machine, in all rollout workers; an episode that needs its first one waits. 0: no
    limit."""
    mcp: Annotated[tuple[str, ...], ResumeMayChange] = ()
    """Servers of the Model Context Protocol whose tools a `ToolEnv` offers besides its own: for each its command, its address
    (``http://HOST:PORT/mcp``), or a JSON file with ``mcpServers``."""
