"""Paths of the user: absolute from the start, because user code may change the working directory, and shown as they were typed."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "AGENTRL_CACHE"
"""Environment variable with the folder of what can be computed again, if it is not the usual one."""

_typed: dict[Path, Path] = {}  # absolute path -> what the user wrote


def cache_folder() -> Path:
    """Return the user's folder for what can be computed again, ``~/.cache/agentrl`` unless ``AGENTRL_CACHE`` or XDG says otherwise."""
    own = os.environ.get(CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute form of a path of the user, in which ``~`` is the home directory; `shown_path` finds the typed one again."""
    typed = Path(path)
    found = typed.expanduser().absolute()
    if not typed.is_absolute():
        _typed[found] = typed
    return found


def absolute_names(text: str) -> str:
    """Return names, with commas between several, with the absolute path of every file or directory among them.

    A name may be a path or ``file.py:Name``; any other, as that of a model of the hub, a data set or an address, stays as it is.
    """
    if "," in text and not Path(text).expanduser().exists():
        return ",".join(map(absolute_names, text.split(",")))
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py") and Path(file).expanduser().is_file():
        found = f"{absolute_path(file)}:{name}"
        _typed[Path(found)] = Path(text)
        return found
    return str(absolute_path(text.strip())) if text.strip() and Path(text.strip()).expanduser().exists() else text


def near_path(path: str) -> str:
    """Return a path below the working directory as it is typed there; another one, and a name that is no path, as it is."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as the user typed it, or below a directory that the user typed."""
    given = Path(path)
    for parent in (given, *given.parents):
        if parent in _typed:
            return str(_typed[parent] / given.relative_to(parent))
    return str(path)


def past_folder(folder: Path, step: int) -> Path:
    """Return the directory of earlier weights."""
    return folder / f"step-{step:08d}"
