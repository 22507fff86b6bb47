"""Settings of images in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from agentrl.core.errors import ConfigError
from agentrl.core.settings import Count, ResumeMayChange


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


def observing(agent: str, observe: str) -> str:
    """Return the name of an environment with what it is to show the model, ``text`` or ``pixels``.

    Raises:
        ConfigError: If pictures are asked for, and it is no environment of gymnasium.
    """
    if observe == "text" or not agent or "observe=" in agent.partition("?")[2]:
        return agent
    if not agent.startswith("gym:"):
        remedy = 'In a class of yours that inherits from GymEnv write observe = "pixels"; other environments return images themselves.'
        raise ConfigError("--observe", observe, f"is for gym:ID, and --agent is {agent!r}", remedy)
    return f"{agent}{'&' if '?' in agent else '?'}observe={observe}"
