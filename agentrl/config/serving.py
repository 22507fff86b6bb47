"""Settings of ``agentrl serve-sandboxes`` and ``agentrl serve-reward-model``."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Literal

from agentrl.core.errors import ConfigError
from agentrl.core.process import LOOPBACK
from agentrl.core.sandboxes import DEFAULT_IMAGE, KEY
from agentrl.core.settings import Count, CountOrZero, Port

MIN_KEY = 16


@dataclass(frozen=True, kw_only=True)
class SandboxServing:
    """The sandboxes of a machine, and the address at which they are offered."""

    port: Port = 8300
    """Port to listen on. 0: a free one."""
    host: str = LOOPBACK
    """Address to listen on. Any other than loopback needs a key in the environment variable ``AGENTRL_SANDBOX_KEY``."""
    certificate: str = ""
    """File with a certificate and its private key (PEM); the server then speaks HTTPS."""
    sandbox: Literal["local", "container", "none"] = "local"
    """Kind of the sandboxes, as in training: ``local`` needs bubblewrap, ``container`` podman or docker; ``none`` has no wall."""
    sandbox_image: str = DEFAULT_IMAGE
    """Image of containers for which the client names none."""
    sandbox_read: tuple[str, ...] = ()
    """Files and folders of this machine that the programs may read, besides those of the system and of Python, or of the image."""
    max_running: Count = 64
    """Sandboxes that are held at a time; clients that ask for more wait."""
    max_starting: CountOrZero = 0
    """Programs whose sandboxes start at a time. 0: two for each core."""


def serving_key(serving: SandboxServing) -> str:
    """Return the key of a server: that of the environment, else on loopback a new one.

    Raises:
        ConfigError: If others could reach the server and the key is missing or too short.
    """
    key = os.environ.get(KEY, "")
    if key and len(key) < MIN_KEY:
        raise ConfigError(
            KEY, f"{len(key)} characters", "is too short to be safe", f"Set at least {MIN_KEY}, such as {secrets.token_hex(16)}."
        )
    if not key and not serving.host.startswith("127.") and serving.host not in ("localhost", "::1"):
        problem = "would let whoever reaches it run programs here without a key"
        raise ConfigError("--host", serving.host, problem, f"Set the environment variable {KEY}, here and for the trainer.")
    return key or secrets.token_urlsafe(24)


@dataclass(frozen=True, kw_only=True)
class RewardServing:
    """One reward model, and how it is served over HTTP."""

    model: str = ""
    """A reward model: a Hugging Face directory or hub name, as ``agentrl reward-model`` writes it."""
    port: Port = 5000
    """Port to listen on. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Whoever reaches it may ask the model; there is no key."""
    batch_size: Count = 64
    """Texts that go through the model at once."""
    max_pending: Count = 1024
    """Texts that may wait; further requests are refused with 429 and ``Retry-After``."""
    max_tokens: CountOrZero = 0
    """Tokens that are read; of a longer text the last ones. 0: the context length of the model."""
    value_head_prefix: str = ""
    """Name of the layer that makes the score, in the model's files. Empty: ``score``, or what its ``config.json`` says."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""
