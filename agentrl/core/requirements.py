"""Packages that agentrl needs and this Python may lack; nothing but the standard library is imported here."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

MISSING = 2
"""Exit code of a command whose packages are missing: a request that cannot be met."""


def refuse_missing() -> None:
    """End this command, with the packages that are missing and how to install them, if there are any."""
    if lines := missing():
        words = " ".join(f'"{line}"' for line in lines)
        sys.stderr.write(f"agentrl needs packages that {sys.executable} lacks. Install them:\n  {sys.executable} -m pip install {words}\n")
        sys.exit(MISSING)


def missing() -> list[str]:
    """Return the requirements, extras left out, of which no version is installed; empty if agentrl itself is not, as in a copied folder."""
    try:
        asked = distribution("agentrl").requires or []
    except PackageNotFoundError:
        return []
    return [line for line in asked if "extra ==" not in line and not _is_installed(line)]


def _is_installed(line: str) -> bool:
    name = re.match(r"[\w.-]+", line)
    try:
        return name is None or bool(distribution(name[0]))
    except PackageNotFoundError:
        return False
