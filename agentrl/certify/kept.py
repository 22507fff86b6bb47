"""Certificates kept between runs, by the hash of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.certify.results import Certificate
from agentrl.core.files import write_text
from agentrl.core.paths import cache_folder

PACKAGES = ("transformers", "torch", "peft")
SOURCES = ("certify", "learner", "engine", "weights")
"""Parts of agentrl that decide the outcome."""
PASSED_OVER = ("_name_or_path", "transformers_version")
"""Fields of a configuration that decide nothing."""


def certificate_file(settings: Mapping[str, Any], tried: Sequence[str]) -> Path:
    """Return the file of the certificate of a model with the contents `settings` of its ``config.json``.

    Args:
        settings: The configuration.
        tried: The parts that were compared, such as the kernels of the learner.
    """
    digest = hashlib.sha256()
    fields = {name: value for name, value in settings.items() if name not in PASSED_OVER}
    digest.update(json.dumps([fields, list(tried), [_version(name) for name in PACKAGES]], sort_keys=True, default=str).encode())
    package = Path(__file__).parent.parent
    # The code itself counts, not its version, which stays the same while a part is worked on.
    for part in SOURCES:
        for path in sorted((package / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return cache_folder() / "certificates" / f"{digest.hexdigest()[:32]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def read_certificate(path: Path) -> Certificate | None:
    """Return a kept certificate; `None` if there is none, or it cannot be read."""
    try:
        return Certificate.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_certificate(path: Path, certificate: Certificate) -> None:
    """Write a certificate; nothing is kept where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(certificate.to_dict(), indent=2) + "\n")
    except OSError:
        return
