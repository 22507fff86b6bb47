"""Python files that a user names on the command line, ``file.py:name``: importing them, and keeping a copy beside the run.

Every process that needs a plug-in imports its file by the absolute path that the resolved configuration holds, so nothing of it has
to be pickled. Errors name the flag, the value and the remedy.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import ConfigError

FORM = "Write file.py:name."
FOLDER = "plugins"
"""Folder of a run directory that holds a copy of each plug-in's file."""

PACKAGE = Path(__file__).parents[1]

_imported: dict[Path, tuple[bytes, ModuleType]] = {}
"""Files of plug-ins that this process has imported, with their text; two plug-ins of one file share its module."""


def is_plugin(value: str) -> bool:
    """Return whether a setting names a file rather than something built in."""
    return ":" in value or value.endswith(".py")


def resolve_plugin(flag: str, spec: str) -> str:
    """Return ``file.py:name`` with the absolute path of the file.

    Raises:
        ConfigError: If it has another form, or there is no such file.
    """
    file, name = _split(flag, spec)
    _check_file(flag, spec, file, f"Looked for {file.absolute()}.", ConfigError)
    return f"{file.resolve()}:{name}"


def load_plugin(flag: str, spec: str) -> Any:
    """Import the file of ``file.py:name``, once in a process unless its text changes, and return what the name stands for.

    Raises:
        ConfigError: If there is no such file or name, or importing the file fails.
    """
    file, name = _split(flag, spec)
    _check_file(flag, spec, file, f"Looked for {file.absolute()}.", ConfigError)
    file, text = file.resolve(), file.read_bytes()
    known, module = _imported.get(file, (None, None))
    if module is None or known != text:
        module = import_file(flag, spec, file, prefix="agentrl_plugin")
        _imported[file] = (text, module)
    if not hasattr(module, name):
        problem = f"there is no {name!r} in {file}"
        raise ConfigError(flag, spec, problem, suggest(name, vars(module)) or "Name a function or class of the file.")
    return getattr(module, name)


def _split(flag: str, spec: str) -> tuple[Path, str]:
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(flag, spec, "is not of the form file.py:name", FORM)
    return Path(path).expanduser(), name


def copy_plugins(specs: Iterable[str], run_dir: Path) -> None:
    """Copy the file of each plug-in into the run directory."""
    for source, copy in plugin_copies(specs, run_dir).items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)


def plugin_copies(specs: Iterable[str], run_dir: Path) -> dict[Path, Path]:
    """Return where the run directory holds the copy of each plug-in's file; files of the same name get a suffix."""
    files = dict.fromkeys(Path(spec.rpartition(":")[0]) for spec in specs)
    shared = {file for file in files for other in files if file != other and file.name == other.name}
    return {file: run_dir / FOLDER / (f"{file.stem}-{_digest(file)}.py" if file in shared else file.name) for file in files}


def restorable(error: ConfigError, run_dir: Path) -> ConfigError:
    """Return the error for a file that is gone, with the command that restores it from its copy in a run's directory, if there is one."""
    spec = str(error.value)
    file = Path(spec.rpartition(":")[0])
    copy = plugin_copies([spec], run_dir).get(file)
    if file.exists() or copy is None or not copy.exists():
        return error
    return ConfigError(error.field, spec, "there is no such file any more", f"Restore it: cp {copy} {file}")


@contextmanager
def kept_in_run(given: Mapping[str, Any]) -> Iterator[None]:
    """Name the copy of a user's file that is gone, if settings say with ``resume`` that a run goes on which has it."""
    try:
        yield
    except ConfigError as error:
        place = given.get("run_dir") if given.get("resume") == "auto" else given.get("resume")
        raise restorable(error, Path(place)) if place else error from None


def import_file(flag: str, spec: str, file: Path, *, prefix: str, forms: str = FORM, error: type[ConfigError] = ConfigError) -> ModuleType:
    """Import a file, each time anew, under a name that follows from its path; `forms` is the remedy if it is no Python file.

    Raises:
        ConfigError: Or the class given, if there is no such file, or importing it fails.
    """
    _check_file(flag, spec, file, forms, error)
    stem = re.sub(r"\W", "_", file.stem)
    name = f"{prefix}_{stem}_{_digest(file)}"
    found = importlib.util.spec_from_file_location(name, file.resolve())
    if found is None or found.loader is None:
        raise error(flag, spec, "is not a Python file", forms)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        with search_first(str(file.resolve().parent)), named_errors(flag, spec, error):
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _digest(file: Path) -> str:
    return hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()


def _check_file(flag: str, spec: str, file: Path, forms: str, error: type[ConfigError]) -> None:
    if file.is_file():
        return
    problem = "is a folder" if file.is_dir() else "there is no such file"
    names = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
    raise error(flag, spec, problem, suggest(file.name, names) or forms)


@contextmanager
def search_first(folder: str) -> Iterator[None]:
    """Import from `folder` first, and afterwards last, so that imports inside functions still find neighbours."""
    sys.path.insert(0, folder)
    # The import system remembers what folders hold, and would not find a file that was written a moment ago.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


@contextmanager
def named_errors(flag: str, spec: str, error: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Turn what importing a user's file raises into an error that names the flag, the value and the place in the file."""
    try:
        yield
    except error:
        raise
    except SyntaxError as raised:
        raise error(flag, spec, f"{raised.msg} ({raised.filename}, line {raised.lineno})", "Correct the file.") from raised
    # A file that calls `sys.exit` when it is imported must not end this process without a word.
    except (Exception, SystemExit) as raised:
        problem = f"importing it raised {type(raised).__name__}: {raised} ({last_user_frame(raised)})"
        remedy = f"Install the package that provides {raised.name!r}." if isinstance(raised, ModuleNotFoundError) else "Correct the file."
        raise error(flag, spec, problem, remedy) from raised


def last_user_frame(error: BaseException, file: str = "") -> str:
    """Return file and line of the innermost frame of an exception, in `file` if there is one, else outside agentrl and importlib."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and PACKAGE not in Path(frame.filename).parents]
    inside = [frame for frame in own if frame.filename == file]
    frame = (inside or own or list(frames))[-1]
    return f"{frame.filename}, line {frame.lineno}"


def suggest(name: str, candidates: Iterable[str]) -> str:
    """Return a question with the most similar of `candidates`; empty if none is similar."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f"Did you mean {close[0]}?" if close else ""


KEPT = "environment"
"""Folder of a run's directory with a copy of the environment's file."""


def kept_environment(spec: str, run_dir: Path) -> str:
    """Return a run's specification of its environment, or one of the copy in its directory if the file is not found from this folder."""
    path, _, name = (spec, "", "") if spec.endswith(".py") else spec.rpartition(":")
    copy = run_dir / KEPT / Path(path).name
    if not path.endswith(".py") or Path(path).expanduser().exists() or not copy.is_file():
        return spec
    return f"{copy}:{name}" if name else str(copy)
