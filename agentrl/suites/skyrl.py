"""Environments of SkyRL-gym (https://github.com/NovaSky-AI/SkyRL): ``--agent skyrl:ID`` and ``--agent skyrl:file.py@CLASS``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, get_args, get_type_hints

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import as_messages
from agentrl.env.agent import AgentInstance, ResetResult, ResetState, StepResult, StepState
from agentrl.env.results import bad_result, number
from agentrl.suites.scheme import FLAG, Scheme
from agentrl.suites.specs import check_known, class_name, figures, import_suite, named_object, refused, split_spec

FORM = "Write skyrl:ID of a registered environment, or skyrl:file.py@CLASS."
METHODS = ("init", "step")


class SkyrlEnv(AgentInstance):
    """One rollout of a `BaseTextEnv`: `init` with the prompt, `step` with each answer, until it is done.

    Attributes:
        make: Makes the environment from ``env_config`` and ``extras``.
        env_config: Options of the specification, as attributes.
        max_turns: Turns that the environment is told to allow; `None`: its own default.
    """

    make: ClassVar[Callable[..., Any]]
    env_config: ClassVar[Any] = None
    max_turns: ClassVar[int | None] = None

    _env: Any = None

    def reset(self, state: ResetState) -> ResetResult:
        """Make the environment with all columns of the row, and begin."""
        extras = {**state.task.metadata, **({"max_turns": self.max_turns} if self.max_turns else {})}
        self._env = type(self).make(env_config=self.env_config, extras=extras)
        prompt, told = self._env.init(as_messages(state.task.prompt))
        return ResetResult(prompt, info=figures(told))

    def step(self, state: StepState) -> StepResult:
        """Pass the answer on; what the environment makes of its text for its own history is not trained, as it was not sampled."""
        said = self._env.step(state.action_text)
        if not isinstance(said, Mapping) or not {"reward", "done"} <= said.keys():
            raise bad_result(f"{type(self).__name__}.step", "result", said, "must be a BaseTextEnvStepOutput with reward and done")
        done, shown = bool(said["done"]), said.get("observations")
        info = {**figures(said.get("metadata")), **(figures(self._metrics()) if done else {})}
        reward = number(said["reward"], f"{type(self).__name__}.step", "reward")
        return StepResult(reward, None if done else shown or None, terminated=done, info=info)

    def _metrics(self) -> Any:
        return self._env.get_metrics() if hasattr(self._env, "get_metrics") else {}

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None and hasattr(self._env, "close"):
            self._env.close()


def load_skyrl(spec: str) -> type[SkyrlEnv]:
    """Return the class for ``skyrl:ID`` or ``skyrl:file.py@CLASS``; options but `max_turns` are fields of ``env_config``."""
    name, options = split_spec(spec)
    if "@" in name:
        cls, spec, options = named_object(spec, FORM)
        if missing := [method for method in METHODS if not callable(getattr(cls, method, None))]:
            raise EnvLoadError(FLAG, spec, f"{cls!r:.80} has no method {missing[0]}", "Name a class that inherits from BaseTextEnv.")
        make, name = _maker(cls), cls.__name__
    else:
        suite = import_suite(spec, "skyrl_gym.envs.registration", "", "skyrl-gym")
        check_known(spec, "SkyRL-gym", name, list(suite.registry))
        cls, make = suite.load_env_creator(suite.registry[name].entry_point), partial(suite.make, name)
    turns = options.pop("max_turns", None)
    if turns is not None and (type(turns) is not int or turns < 1):
        raise EnvLoadError(FLAG, spec, f"max_turns = {turns!r} is out of range", "Give a whole number from 1.")
    body = {"make": staticmethod(make), "env_config": _config(spec, cls, options), "max_turns": turns, "agent_spec": spec}
    return type(class_name(name, "Skyrl"), (SkyrlEnv,), {**body, "__module__": __name__})


def _config(spec: str, cls: type[Any], options: Mapping[str, Any]) -> Any:
    """Return the ``env_config`` of a class: the data class that its constructor names, with its defaults, else the options alone."""
    hint = get_type_hints(cls.__init__).get("env_config")
    kind: Any = next((each for each in (hint, *get_args(hint)) if is_dataclass(each)), SimpleNamespace)
    try:
        return kind(**options)
    except TypeError as error:
        raise refused(spec, f"the settings {kind.__name__}", error, "Options are its fields.") from error


def _maker(cls: type[Any]) -> Callable[..., Any]:
    """Return a function that makes an object of a class, whose constructor may take ``env_config`` and ``extras``, or neither."""
    wanted = inspect.signature(cls).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in wanted.values())

    def make(**given: Any) -> Any:
        return cls(**(given if takes_all else {name: value for name, value in given.items() if name in wanted}))

    return make


SKYRL = Scheme(
    name="skyrl",
    load=load_skyrl,
    form="skyrl:ID",
    about="[SkyRL-gym](https://github.com/NovaSky-AI/SkyRL): its environments by name, and classes of `BaseTextEnv` in a file, unchanged "
    "([below](#skyrl-gym))",
    needs="`pip install skyrl-gym`",
)
