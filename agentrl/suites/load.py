"""Loader of the class that ``--agent`` names, from a file, a module or a suite."""

from __future__ import annotations

import difflib
import importlib
import inspect
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core import plugins
from agentrl.core.errors import ConfigError, EnvLoadError
from agentrl.core.plugins import suggest
from agentrl.env.agent import AgentClass, AgentInstance
from agentrl.env.agent_spec import AgentKind, AgentSpec, kind_of
from agentrl.env.black_box import check_black_box
from agentrl.env.executor import check_executor
from agentrl.env.given import PREFIX, module_of, remembered, write_source
from agentrl.env.multi_agent import check_agents
from agentrl.env.rewards.forms import form_of
from agentrl.env.rewards.function import is_reward, reward_environment
from agentrl.env.rewards.server import load_reward_servers
from agentrl.env.tools.environment import ToolEnv
from agentrl.env.tools.mcp_servers import FLAG as MCP_FLAG
from agentrl.env.tools.mcp_servers import servers_of
from agentrl.suites.gymnasium import GymEnv
from agentrl.suites.openrlhf import agents as openrlhf
from agentrl.suites.openrlhf.executor import as_executor
from agentrl.suites.registry import BUILT_IN, NO_SCHEME, installed_schemes, scheme_of
from agentrl.suites.scheme import FLAG
from agentrl.suites.verifiers import LOADER, verifiers_agent

FORMS = "Give file.py, file.py:Name, package.module:Name or SCHEME:ID."
MAX_NAMES = 8
"""Names of a file that an error lists."""
REWARDS = ("reward_func", "reward")
"""Names that a file gives to its reward, if it has no environment."""


def load_agent(spec: str) -> AgentSpec:
    """Load what ``--agent`` names (a file, a module, a scheme, an object that `specify` knows), and say where it is; or `EnvLoadError`."""
    if not spec.strip():
        raise EnvLoadError(FLAG, spec, "no environment is named", FORMS)
    root = str(Path.cwd())
    file, name = split_file(spec)
    path = file and file.absolute()  # now: importing it may change the current directory
    full = spec if path is None else f"{path}:{name}" if name else str(path)
    chosen, cls = _load(full, root)
    if path is not None:
        full = f"{path}:{chosen}"
    full = vars(cls).get("agent_spec", full)  # a specification may name a file among its options
    return AgentSpec(spec=full, root=root, name=cls.__name__, source=_source(cls), loader=load_class)


def load_class(spec: str, root: str) -> AgentClass:
    """Return the class of a specification as `load_agent` completes it; loaded once per process."""
    return _load(spec, root)[1]


def _load(spec: str, root: str) -> tuple[str, AgentClass]:
    """The name that was chosen and the class that it stands for."""
    if spec.startswith(PREFIX):
        return "", _load_object(spec, remembered(spec))
    return _load_named(spec, root)


@lru_cache
def _load_object(spec: str, value: Any) -> AgentClass:
    return _usable(spec, ModuleType("") if module_of(value).__name__ == "__main__" else module_of(value), value, spec.removeprefix(PREFIX))


@lru_cache
def _load_named(spec: str, root: str) -> tuple[str, AgentClass]:
    if (scheme := scheme_of(spec)) is not NO_SCHEME:
        value = scheme.load(spec)
        if isinstance(value, str):
            return "", load_class(value, root)
        return "", _usable(spec, module_of(value), value, getattr(value, "__name__", type(value).__name__))
    file, name = split_file(spec)
    module = _import_file(spec, file) if file is not None else _import_module(spec, root)
    name = name or (spec.partition(":")[2] if file is None else "")
    name = name or _only(spec, module)
    return name, _named(spec, module, name)


def _unknown(spec: str) -> str:
    """Return the remedy for a specification that names nothing: the most similar scheme, the forms, and every scheme."""
    scheme, colon, text = spec.partition(":")
    others = sorted(installed_schemes().keys() - BUILT_IN.keys())
    similar = difflib.get_close_matches(scheme, [*BUILT_IN, *others], n=1) if colon else []
    remedy = f"Did you mean {similar[0]}:{text}? {FORMS}" if similar else FORMS
    installed = f", of installed packages {', '.join(others)}" if others else ""
    return f"{remedy} Built-in schemes are {', '.join(BUILT_IN)}{installed}."


def split_file(spec: str) -> tuple[Path | None, str]:
    """Return the file and the class name, or no file if the specification names a module or begins with a scheme."""
    if spec.startswith(PREFIX) or scheme_of(spec) is not NO_SCHEME:
        return None, ""
    path, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py"):
        path, name = spec, ""
    if path.endswith(".py") or "/" in path or Path(path).exists():
        return Path(path).expanduser(), name
    return None, name


def keep_environment(spec: str, run_dir: Path) -> None:
    """Copy the file of an environment into a run's directory, or write the source of one that was given in Python."""
    file, _ = split_file(spec)
    if file is None:
        write_source(spec, run_dir)
    elif file.is_file():
        (run_dir / plugins.KEPT).mkdir(exist_ok=True)
        with suppress(shutil.SameFileError):  # a resumed run may name its own copy
            shutil.copyfile(file, run_dir / plugins.KEPT / file.name)


def _named(spec: str, module: ModuleType, name: str) -> AgentClass:
    value = getattr(module, name, None)
    if value is None:
        classes = [cls.__name__ for cls in _classes(module) if _has_step(cls)] + _rewards(module)
        remedy = suggest(name, classes) or (f"There is {', '.join(classes)}." if classes else FORMS)
        raise EnvLoadError(FLAG, spec, f"there is no {name!r} in it", remedy)
    return _usable(spec, module, value, name)


def _usable(spec: str, module: ModuleType, value: Any, name: str) -> AgentClass:
    """The class of an environment, whatever form the user's object has."""
    if openrlhf.is_executor(value):
        return _executed(spec, module, value)
    kind = kind_of(value) if inspect.isclass(value) else None
    if kind is AgentKind.EXECUTOR:
        return check_executor(FLAG, spec, value)
    if kind is AgentKind.BLACK_BOX:
        return check_black_box(FLAG, spec, value)
    if name == LOADER and inspect.isfunction(value):
        return verifiers_agent(spec, Path(module.__file__ or LOADER).stem, value, module.__name__)
    if is_reward(value):
        return _rewarded(module, value, name)
    if inspect.isroutine(value) and len(inspect.signature(value).parameters) > 1:
        form_of(value, spec)  # says which parameter fits no form
    if not isinstance(value, type):
        raise EnvLoadError(FLAG, spec, f"{name} is a {type(value).__name__}, not a class", "Name a class with reset and step.")
    # Not imported here: a class that inherits from its Env has loaded it.
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and issubclass(value, gymnasium.Env):
        return type(name, (GymEnv,), {"make": lambda self: value(), "__module__": value.__module__, "__doc__": value.__doc__})
    return _complete(spec, value)


def _complete(spec: str, cls: AgentClass) -> AgentClass:
    missing = [method for method in ("reset", "step") if not _has(cls, method)]
    if missing:
        raise EnvLoadError(FLAG, spec, f"class {cls.__name__} has no method {missing[0]}", _similar_method(cls, missing[0]))
    check_agents(FLAG, spec, cls)
    return cls


def _executed(spec: str, module: ModuleType, executor: type[Any]) -> AgentClass:
    """The environment behind an executor of OpenRLHF's."""
    shared = openrlhf.make_executor(FLAG, spec, executor)
    environment = _environment_of(shared, module)
    if openrlhf.own_execute(executor) is not None:
        shared.environment = environment
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
    return load_class(f"{file.absolute()}:{REWARDS[0]}", "")


def _rewarded(module: ModuleType, reward: Any, name: str) -> AgentClass:
    """A single-turn environment around a file's reward; the file may say its `tasks` too."""
    file, tasks = getattr(module, "__file__", None) or "", getattr(module, "tasks", None)
    return reward_environment(reward, name, module=module.__name__, file=file, tasks=tasks)


def _rewards(module: ModuleType) -> list[str]:
    """The names of a file's rewards: those of `REWARDS`, else of its functions in the forms of TRL and verl, which may have any name."""
    if any(hasattr(module, name) for name in REWARDS):
        return [name for name in REWARDS if is_reward(getattr(module, name, None))]
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"}
    functions = {name: inspect.signature(value).parameters for name, value in own.items() if inspect.isfunction(value)}
    return [name for name, given in functions.items() if "completions" in given or {"solution_str", "ground_truth"} <= given.keys()]


def _only(spec: str, module: ModuleType) -> str:
    """The name of the environment or reward to use if none is named."""
    executors = [cls.__name__ for cls in _classes(module) if cls.__module__ == module.__name__ and openrlhf.is_executor(cls)]
    if executors:
        return "AgentExecutor" if "AgentExecutor" in executors else executors[-1]
    own = [cls for cls in _classes(module) if cls.__module__ == module.__name__ and not cls.__name__.startswith("_")]
    usable = [cls for cls in own if (_has_step(cls) and _has(cls, "reset")) or kind_of(cls).calls_model]
    leaves = [cls for cls in usable if not any(other is not cls and issubclass(other, cls) for other in usable)]
    if len(leaves) == 1:
        return next(name for name, value in vars(module).items() if value is leaves[0])
    if leaves:
        names = [cls.__name__ for cls in leaves]
        raise EnvLoadError(FLAG, spec, f"defines several environments: {', '.join(names)}", f"Name one: {spec.rstrip(':')}:{names[0]}.")
    if inspect.isfunction(getattr(module, LOADER, None)):
        return LOADER
    for cls in own:
        for method in ("reset", "step"):
            if (issubclass(cls, AgentInstance) or _has_step(cls) or _has(cls, "reset")) and not _has(cls, method):
                raise EnvLoadError(FLAG, spec, f"class {cls.__name__} has no method {method}", _similar_method(cls, method))
    rewards = _rewards(module)
    if len(rewards) == 1:
        return rewards[0]
    if rewards:
        remedy = f"Name one: {spec.rstrip(':')}:{rewards[0]}, or define reward = agentrl.combine_rewards(...) of them."
        raise EnvLoadError(FLAG, spec, f"defines several rewards: {', '.join(rewards)}", remedy)
    raise _nothing_found(spec, module)


def _nothing_found(spec: str, module: ModuleType) -> ConfigError:
    """Return the error of a file without environment and reward; it names what is there."""
    for name in REWARDS:
        if inspect.isroutine(value := getattr(module, name, None)):
            form_of(value, f"{spec.rstrip(':')}:{name}")
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    public = [name for name in own if not name.startswith("_")]
    there = f"; it defines {', '.join(public[:MAX_NAMES])}{', ...' * (len(public) > MAX_NAMES)}" if public else ""
    functions = [name for name in public if is_reward(vars(module)[name])]
    remedy = "Write a class that inherits from agentrl.AgentInstance and has a step, or a function reward(completion, label)."
    remedy = f"To judge with {functions[0]}, write --agent {spec.rstrip(':')}:{functions[0]}." if functions else remedy
    return EnvLoadError(FLAG, spec, f"defines no environment and no reward{there}", remedy)


def _classes(module: ModuleType) -> list[AgentClass]:
    return [value for value in vars(module).values() if inspect.isclass(value)]


def _has(cls: AgentClass, method: str) -> bool:
    value = getattr(cls, method, None)
    return callable(value) and not (method == "step" and value is AgentInstance.step)


def _has_step(cls: AgentClass) -> bool:
    return _has(cls, "step")


def _similar_method(cls: AgentClass, method: str) -> str:
    other = {"step": ("get_reward", "trl"), "reset": ("init", "skyrl")}.get(method, ("", ""))
    if callable(getattr(cls, other[0], None)):
        return f"If it is an environment for {other[1]}, write --agent {other[1]}:file.py@{cls.__name__}."
    methods = [name for name, value in vars(cls).items() if callable(value) and not name.startswith("__")]
    return suggest(method, methods) or f"Add a method {method}(self, state)."


def _source(cls: AgentClass) -> str:
    try:
        return inspect.getsourcefile(cls) or cls.__module__
    except (OSError, TypeError):  # of a notebook cell, or typed in
        return cls.__module__


def check_servers(agent: AgentSpec, servers: Sequence[str]) -> None:
    """Refuse servers of ``--mcp`` that cannot be used, and an environment that would not offer their tools."""
    if servers_of(servers, MCP_FLAG) and not issubclass(agent.load(), ToolEnv):
        problem = f"{agent.name} is no ToolEnv, so the model would not be offered their tools"
        raise ConfigError(MCP_FLAG, servers[0], problem, "Leave it out, or let the class inherit from agentrl.ToolEnv.")


def _import_file(spec: str, file: Path) -> ModuleType:
    """Import a file afresh under a module name derived from its path."""
    with openrlhf.importable():
        return plugins.import_file(FLAG, spec, file, prefix="agentrl_user", forms=FORMS, error=EnvLoadError)


def _import_module(spec: str, root: str) -> ModuleType:
    """Import the module of ``package.module:Name``; `root` is searched besides the installed ones."""
    name, colon, _ = spec.partition(":")
    if not colon or not all(part.isidentifier() for part in name.split(".")):
        raise EnvLoadError(FLAG, spec, "is neither a file nor package.module:Name", _unknown(spec))
    with plugins.search_first(root), plugins.named_errors(FLAG, spec, EnvLoadError), openrlhf.importable():
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that the user's own module misses keeps its own message.
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise
            raise EnvLoadError(FLAG, spec, f"there is no module {error.name!r} here or in {root}", _unknown(spec)) from None
