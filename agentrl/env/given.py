"""Environments that Python code gives as objects, such as a class of a notebook cell: known in this process, sent to others by value."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import io
import linecache
import os
import pickle
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import EnvLoadError

PREFIX = "python:"
"""Specifications of objects that no other process can import begin with it."""
SOURCE = "environment.py"
"""File of a run's directory with the source of such an object."""

_objects: dict[str, Any] = {}


def specify(value: Any) -> str:
    """Remember an object (class, reward, executor); return ``package.module:Name`` if any process can import it, else ``python:Name``."""
    module, name = module_of(value), str(getattr(value, "__qualname__", type(value).__name__))
    if name.isidentifier() and _importable(module) and getattr(module, name, None) is value:
        return f"{module.__name__}:{name}"
    name = name.rpartition(".")[2]
    spec = PREFIX + (name if name.isidentifier() else "reward")
    _objects[spec] = value
    return spec


def remembered(spec: str) -> Any:
    """Return the object of a specification that begins with `PREFIX`; `EnvLoadError` if it was given in another process."""
    if spec not in _objects:
        name = spec.removeprefix(PREFIX)
        problem = "was given to agentrl as an object in Python code, which this process does not have"
        remedy = f"Put {name} and its imports into a file and name that, FILE.py:{name}, or pass {name} to the same function in Python."
        raise EnvLoadError("--agent", spec, problem, remedy)
    return _objects[spec]


def to_bytes(spec: str) -> bytes:
    """Return the object of a specification by value, for another process; `EnvLoadError` names what cannot be sent."""
    import cloudpickle

    value, buffer = remembered(spec), io.BytesIO()
    try:
        with _by_value(module_of(value)):
            cloudpickle.dump(value, buffer)
    except Exception as error:  # whatever an object's own __reduce__ raises
        problem = f"cannot be sent to another process: {_culprit(value)}{type(error).__name__}: {error}"
        remedy = 'Make it inside reset, put the environment into a file and name that, or use runtime="local".'
        raise EnvLoadError("--agent", spec, problem, remedy) from error
    return buffer.getvalue()


def from_bytes(spec: str, data: bytes) -> None:
    """Remember an object that `to_bytes` wrote in another process."""
    _objects[spec] = pickle.loads(data)


def source_of(spec: str) -> str:
    """Return the source text of a remembered object; empty if it cannot be had."""
    value = _objects.get(spec)
    try:
        return textwrap.dedent(inspect.getsource(value))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return _source_in_cell(value)


def module_of(value: Any) -> ModuleType:
    """Return the module that defines an object; an empty one if it has none."""
    name = str(getattr(value, "__module__", ""))
    return sys.modules.get(name) or ModuleType(name)


def _importable(module: ModuleType) -> bool:
    """Return whether a process that begins anew in this folder finds a module by its name."""
    top = module.__name__.partition(".")[0]
    if top == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    # `importlib.util.find_spec` would find whatever this process has loaded already, which the other process has not.
    return importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path[1:]]) is not None


@contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    """Have cloudpickle send what a module defines, if the other process could not import the module."""
    import cloudpickle

    foreign = module.__name__ in sys.modules and module.__name__ != "__main__" and not _importable(module)
    if foreign:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if foreign:
            cloudpickle.unregister_pickle_by_value(module)


def _culprit(value: Any) -> str:
    """Return the attribute of a class, or the global variable of its methods, that cannot be sent, as the beginning of a message."""
    import cloudpickle

    functions = [item for item in (value, *vars(value).values()) if inspect.isfunction(item)] if hasattr(value, "__dict__") else []
    places = [(f"its attribute {name}", item) for name, item in getattr(value, "__dict__", {}).items() if not inspect.isfunction(item)]
    for function in functions:
        used = inspect.getclosurevars(function)
        places += [(f"the variable {name}, which it uses,", item) for name, item in {**used.globals, **used.nonlocals}.items()]
    for place, item in places:
        if inspect.ismodule(item) or isinstance(item, type):
            continue
        try:
            cloudpickle.dumps(item)
        except Exception:
            return f"{place} is a {type(item).__name__}; "
    return ""


def _source_in_cell(value: Any) -> str:
    """Return the source of a class of a notebook cell, which `inspect` does not find in every version of Python."""
    method = next((item for item in vars(value).values() if inspect.isfunction(item)), None) if isinstance(value, type) else None
    if method is None:
        return ""
    text = "".join(linecache.getlines(method.__code__.co_filename))
    try:
        classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == value.__name__]
    except SyntaxError:
        return ""
    line = method.__code__.co_firstlineno
    found = next((node for node in classes if node.lineno <= line <= (node.end_lineno or 0)), None)
    return textwrap.dedent(ast.get_source_segment(text, found, padded=True) or "") + "\n" if found else ""


def write_source(spec: str, folder: Path) -> None:
    """Write the source of an object into ``environment.py`` of a run's directory, for readers; without its imports it does not run."""
    text = source_of(spec) if spec.startswith(PREFIX) else ""
    if text:
        head = f"# {spec.removeprefix(PREFIX)} as it was given in Python. Its imports and what else it uses are not here.\n\n"
        (folder / SOURCE).write_text(head + text, encoding="utf-8")
