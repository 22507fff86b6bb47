"""Importing the files and modules that users name, with errors that say where and what to do."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import EnvLoadError
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
        spec: Specification as the user gave it, for messages.
        file: File to import.

    Raises:
        EnvLoadError: If there is no such file, or importing it fails.
    """
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "there is no such file"
        names = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise EnvLoadError(FLAG, spec, what, suggest(file.name, names) or FORMS)
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()
    stem = re.sub(r"\W", "_", file.stem)
    name = f"agentrl_user_{stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, file.resolve())
    if found is None or found.loader is None:
        raise EnvLoadError(FLAG, spec, "is not a Python file", FORMS)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        with _search_first(str(file.resolve().parent)), _user_import(spec), openrlhf.importable():
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_module(spec: str, root: str) -> ModuleType:
    """Import the module of ``package.module:Name``.

    Args:
        spec: Specification as the user gave it.
        root: Folder searched for modules before the installed ones.

    Raises:
        EnvLoadError: If there is no such module, or importing it fails.
    """
    name, colon, _ = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        raise EnvLoadError(FLAG, spec, "is neither a file nor package.module:Name", FORMS)
    with _search_first(root), _user_import(spec), openrlhf.importable():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            raise EnvLoadError(FLAG, spec, f"there is no module {error.name!r} here or in {root}", FORMS) from None


@contextmanager
def _search_first(folder: str) -> Iterator[None]:
    """Import from `folder` first, and afterwards last, so that imports inside functions still find neighbours."""
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


@contextmanager
def _user_import(spec: str) -> Iterator[None]:
    try:
        yield
    except EnvLoadError:
        raise
    except SyntaxError as error:
        raise EnvLoadError(FLAG, spec, f"{error.msg} ({error.filename}, line {error.lineno})", "Correct the file.") from error
    except (Exception, SystemExit) as error:
        where = _last_user_frame(error)
        problem = f"importing it raised {type(error).__name__}: {error} ({where})"
        remedy = f"Install the package that provides {error.name!r}." if isinstance(error, ModuleNotFoundError) else "Correct the file."
        raise EnvLoadError(FLAG, spec, problem, remedy) from error


def _last_user_frame(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    frame = (own or list(frames))[-1]
    return f"{frame.filename}, line {frame.lineno}"


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return "Did you mean ...?" with the most similar of `candidates`; empty if none is similar."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f"Did you mean {close[0]}?" if close else ""
