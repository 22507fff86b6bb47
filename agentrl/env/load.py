"""Finding the class that ``--agent`` names, in a file or in a module."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import EnvLoadError
from agentrl.env.adapters.gem import load_gem
from agentrl.env.adapters.gymnasium import load_gym
from agentrl.env.adapters.nemo_gym import load_nemo_gym
from agentrl.env.adapters.openenv import load_openenv
from agentrl.env.adapters.reasoning_gym import load_reasoning_gym
from agentrl.env.adapters.textarena import load_textarena
from agentrl.env.agent import AgentClass, AgentInstance
from agentrl.env.executor import Executor, check_executor
from agentrl.env.openrlhf import agents as openrlhf
from agentrl.env.openrlhf.executor import as_executor
from agentrl.env.openrlhf.play import Play
from agentrl.env.rewards.function import is_reward, load_reward_servers, reward_environment
from agentrl.env.roster import check_roster

FLAG = "--agent"
FORMS = "Give file.py, file.py:Name, package.module:Name or SUITE:ID with gym, reasoning-gym, textarena, gem, nemo-gym or openenv."
REWARDS = ("reward_func", "reward")
"""Names that a file gives to its reward, if it has no environment."""

SCHEMES: dict[str, Callable[[str], AgentClass]] = {
    "gym": load_gym,
    "reward": load_reward_servers,
    "reasoning-gym": load_reasoning_gym,
    "textarena": load_textarena,
    "gem": load_gem,
    "nemo-gym": load_nemo_gym,
    "openenv": load_openenv,
}
"""Loaders of specifications that begin with a scheme and a colon; each is given the whole specification."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Where an environment's class is; small and picklable, so that another process can load it too.

    Attributes:
        spec: What ``--agent`` said, with the path of a file made absolute and the class named.
        root: Folder that modules are searched in besides the installed ones.
        name: Name of the class.
        source: The file that defines it, for messages.
    """

    spec: str
    root: str
    name: str
    source: str

    def load(self) -> AgentClass:
        """The class; loaded once per process.

        Raises:
            EnvLoadError: If it cannot be loaded here.
        """
        return _load(self.spec, self.root)[1]


def load_agent(spec: str) -> AgentSpec:
    """Load what ``--agent`` names, and say where it is.

    Args:
        spec: ``file.py``, ``file.py:Name``, ``package.module:Name``, or a scheme in `SCHEMES` and what follows it.

    Raises:
        EnvLoadError: If there is no such file, module or class, if importing it fails, or if the choice is not clear.
    """
    if not spec.strip():
        raise EnvLoadError(FLAG, spec, "is missing", FORMS)
    root = str(Path.cwd())
    file, name = _split_file(spec)
    full = f"{file.absolute()}:{name}" if file is not None else spec
    found, cls = _load(full, root)
    if file is not None:
        full = f"{file.absolute()}:{found}"
    full = vars(cls).get("agent_spec", full)  # a specification may name a file among its options
    return AgentSpec(spec=full, root=root, name=cls.__name__, source=_source(cls))


def load_value(spec: str, name: str) -> Any:
    """What ``file.py:name`` stands for, which is part of the specification `spec`.

    Raises:
        EnvLoadError: If there is no such file or name.
    """
    path, _, attribute = name.rpartition(":")
    module = _import_file(spec, Path(path).expanduser())
    if not hasattr(module, attribute):
        raise EnvLoadError(FLAG, spec, f"there is no {attribute!r} in {path}", _suggest(attribute, vars(module)) or "Write file.py:name.")
    return getattr(module, attribute)


@lru_cache
def _load(spec: str, root: str) -> tuple[str, AgentClass]:
    """The name that was chosen and the class that it stands for."""
    scheme = spec.partition(":")[0]
    if scheme in SCHEMES:
        return "", SCHEMES[scheme](spec)
    file, name = _split_file(spec)
    module = _import_file(spec, file) if file is not None else _import_module(spec, root)
    name = name or (spec.partition(":")[2] if file is None else "")
    name = name or _only(spec, module)
    return name, _named(spec, module, name)


def _split_file(spec: str) -> tuple[Path | None, str]:
    """The file and the class name, or no file if the specification names a module or begins with a scheme."""
    if spec.partition(":")[0] in SCHEMES:
        return None, ""
    path, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        path, name = spec, ""
    if path.endswith(".py") or "/" in path or Path(path).exists():
        return Path(path).expanduser(), name
    return None, name


def _import_file(spec: str, file: Path) -> ModuleType:
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "there is no such file"
        names = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise EnvLoadError(FLAG, spec, what, _suggest(file.name, names) or FORMS)
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


def _import_module(spec: str, root: str) -> ModuleType:
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


def _named(spec: str, module: ModuleType, name: str) -> AgentClass:
    value = getattr(module, name, None)
    if value is None:
        classes = [cls.__name__ for cls in _classes(module) if _has_step(cls)] + _rewards(module)
        remedy = _suggest(name, classes) or (f"There is {', '.join(classes)}." if classes else FORMS)
        raise EnvLoadError(FLAG, spec, f"there is no {name!r} in it", remedy)
    if openrlhf.is_executor(value):
        return _executed(spec, module, value)
    if inspect.isclass(value) and issubclass(value, Executor):
        return check_executor(FLAG, spec, value)
    if is_reward(value):
        return _rewarded(module, value, name)
    if not isinstance(value, type):
        raise EnvLoadError(FLAG, spec, f"{name} is a {type(value).__name__}, not a class", "Name a class with reset and step.")
    return _complete(spec, value)


def _complete(spec: str, cls: AgentClass) -> AgentClass:
    missing = [method for method in ("reset", "step") if not _has(cls, method)]
    if missing:
        raise EnvLoadError(FLAG, spec, f"class {cls.__name__} has no method {missing[0]}", _similar_method(cls, missing[0]))
    check_roster(FLAG, spec, cls)
    return cls


def _executed(spec: str, module: ModuleType, executor: type[Any]) -> AgentClass:
    """The environment behind an executor of OpenRLHF's."""
    shared = openrlhf.make_executor(FLAG, spec, executor)
    environment = _environment_of(shared, module)
    if openrlhf.own_execute(executor) is not None:
        shared.play = partial(Play, environment)
        return check_executor(FLAG, spec, as_executor(FLAG, spec, shared))
    if environment is None:
        problem = f"{executor.__name__} names neither an agent class nor a reward"
        raise EnvLoadError(FLAG, spec, problem, "Call super().__init__(AgentInstance) in its __init__.")
    return _complete(spec, environment)


def _environment_of(executor: Any, module: ModuleType) -> AgentClass | None:
    """The environment of an executor's episodes, if it names one."""
    cls, reward = openrlhf.executor_parts(executor)
    if cls is not None or not reward:
        return cls
    if not isinstance(reward, list):
        return _rewarded(module, reward, type(executor).__name__)
    if not str(reward[0]).endswith(".py"):
        return load_reward_servers(f"reward:{','.join(reward)}")
    file = Path(reward[0]) if Path(reward[0]).is_file() else Path(module.__file__ or "").parent / reward[0]
    return _load(f"{file.absolute()}:{REWARDS[0]}", "")[1]


def _rewarded(module: ModuleType, reward: Any, name: str) -> AgentClass:
    """A single-turn environment around a file's reward; the file may say its `tasks` too."""
    return reward_environment(reward, name, module=module.__name__, file=module.__file__ or "", tasks=getattr(module, "tasks", None))


def _rewards(module: ModuleType) -> list[str]:
    return [name for name in REWARDS if is_reward(getattr(module, name, None))]


def _only(spec: str, module: ModuleType) -> str:
    """The name of the environment or reward to use if none is named."""
    executors = [cls.__name__ for cls in _classes(module) if cls.__module__ == module.__name__ and openrlhf.is_executor(cls)]
    if executors:
        return "AgentExecutor" if "AgentExecutor" in executors else executors[-1]
    own = [cls for cls in _classes(module) if cls.__module__ == module.__name__ and not cls.__name__.startswith("_")]
    usable = [cls for cls in own if (_has_step(cls) and _has(cls, "reset")) or issubclass(cls, Executor)]
    leaves = [cls for cls in usable if not any(other is not cls and issubclass(other, cls) for other in usable)]
    if len(leaves) == 1:
        return next(name for name, value in vars(module).items() if value is leaves[0])
    if leaves:
        names = [cls.__name__ for cls in leaves]
        raise EnvLoadError(FLAG, spec, f"defines several environments: {', '.join(names)}", f"Name one: {spec.rstrip(':')}:{names[0]}.")
    for cls in own:
        for method in ("reset", "step"):
            if (issubclass(cls, AgentInstance) or _has_step(cls) or _has(cls, "reset")) and not _has(cls, method):
                raise EnvLoadError(FLAG, spec, f"class {cls.__name__} has no method {method}", _similar_method(cls, method))
    rewards = _rewards(module)
    if len(rewards) == 1:
        return rewards[0]
    if rewards:
        raise EnvLoadError(FLAG, spec, f"defines several rewards: {', '.join(rewards)}", f"Name one: {spec.rstrip(':')}:{rewards[0]}.")
    remedy = "Write a class that inherits from agentrl.AgentInstance and has a step, or a function reward(completion, label)."
    raise EnvLoadError(FLAG, spec, "defines no environment and no reward", remedy)


def _classes(module: ModuleType) -> list[AgentClass]:
    return [value for value in vars(module).values() if inspect.isclass(value)]


def _has(cls: AgentClass, method: str) -> bool:
    value = getattr(cls, method, None)
    return callable(value) and not (method == "step" and value is AgentInstance.step)


def _has_step(cls: AgentClass) -> bool:
    return _has(cls, "step")


def _similar_method(cls: AgentClass, method: str) -> str:
    methods = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("__")]
    return _suggest(method, methods) or f"Add a method {method}(self, state)."


def _suggest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f"Did you mean {close[0]}?" if close else ""


def _source(cls: AgentClass) -> str:
    try:
        return inspect.getsourcefile(cls) or cls.__module__
    except TypeError:
        return cls.__module__
