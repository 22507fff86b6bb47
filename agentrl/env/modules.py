"""Importing the files and modules that ``--agent`` names, with errors that say where and what to do."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core import plugins
from agentrl.core.errors import EnvLoadError
from agentrl.core.plugins import suggest
from agentrl.env.openrlhf import agents as openrlhf

FLAG = "--agent"
FORMS = "Give file.py, file.py:Name, package.module:Name or SUITE:ID with gym, reasoning-gym, textarena, gem, nemo-gym or openenv."


def load_value(spec: str, name: str) -> Any:
    """Return the value that ``file.py:name``, a part of the specification `spec`, names.

    Raises:
        EnvLoadError: If there is no such file or name.
    """
    path, _, attribute = name.rpartition(":")
    module = import_file(spec, Path(path).expanduser())
    if not hasattr(module, attribute):
        raise EnvLoadError(FLAG, spec, f"there is no {attribute!r} in {path}", suggest(attribute, vars(module)) or "Write file.py:name.")
    return getattr(module, attribute)


def import_file(spec: str, file: Path) -> ModuleType:
    """Import a file afresh under a module name derived from its path.

    Args:
        spec: The specification that the user gave, for messages.
        file: File to import.

    Raises:
        EnvLoadError: If there is no such file, or importing it fails.
    """
    with openrlhf.importable():
        return plugins.import_file(FLAG, spec, file, prefix="agentrl_user", forms=FORMS, error=EnvLoadError)


def import_module(spec: str, root: str) -> ModuleType:
    """Import the module of ``package.module:Name``.

    Args:
        spec: The specification that the user gave.
        root: Folder searched for modules besides the installed ones.

    Raises:
        EnvLoadError: If there is no such module, or importing it fails.
    """
    name, colon, _ = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        raise EnvLoadError(FLAG, spec, "is neither a file nor package.module:Name", FORMS)
    with plugins.search_first(root), plugins.named_errors(FLAG, spec, EnvLoadError), openrlhf.importable():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            raise EnvLoadError(FLAG, spec, f"there is no module {error.name!r} here or in {root}", FORMS) from None
