"""Environments of verifiers (Prime Intellect) as black-box agents; see https://github.com/PrimeIntellect-ai/verifiers.

``--agent verifiers:NAME`` loads an installed environment, and ``--agent file.py`` a file with a function ``load_environment``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, cast

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Message, Prompt, Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.suites.scheme import FLAG
from agentrl.suites.specs import class_name, refused

LOADER = "load_environment"
ROW = "row"

_lock = threading.RLock()
_failures: ContextVar[list[BaseException]] = ContextVar("failures")
"""Exceptions of reward functions in the current episode; verifiers takes them for a reward of 0."""


class VerifiersAgent(BlackBoxAgent):
    """One rollout of an environment: its program talks to the model, and its rubric judges.

    Attributes:
        make: Makes the environment, once per process.
        spec: What ``--agent`` said, for messages.
    """

    make: ClassVar[Callable[[], Any]]
    spec: ClassVar[str] = ""
    _environment: ClassVar[Any] = None

    @classmethod
    def environment(cls) -> Any:
        """The environment; `EnvLoadError` if it cannot be made or needs what the endpoint does not have."""
        with _lock:
            if cls._environment is None:
                try:
                    with _signals_kept():
                        made = cls.make()
                except Exception as error:
                    raise refused(cls.spec, LOADER, error, "Options are the function's arguments: verifiers:NAME?option=value.") from error
                _check(cls.spec, made)
                _watch(made.rubric)
                cls._environment = made
            return cls._environment

    @classmethod
    def preload(cls) -> None:
        """Make the environment."""
        cls.environment()

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """One task per row of the environment's data set."""
        made = cls.environment()
        return _tasks(made.get_dataset() if getattr(made, "dataset", None) is not None else made.get_eval_dataset())

    @classmethod
    def eval_tasks(cls) -> Iterable[Task] | None:
        """One task per row of the data set for evaluation, if there is one beside the first."""
        made = cls.environment()
        both = getattr(made, "dataset", None) is not None and getattr(made, "eval_dataset", None) is not None
        return _tasks(made.get_eval_dataset()) if both else None

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Roll out and judge; an error that the environment notes in its state is raised, because its reward of 0 would be none."""
        made = self.environment()
        failures: list[BaseException] = []
        _failures.set(failures)
        async with llm.openai() as client:
            state = await made.rollout(dict(task.metadata[ROW]), client, llm.model, {})
            if state.get("error") is not None:
                error = state["error"]
                raise RuntimeError(f"the rollout ended with {type(error).__name__}: {error}") from _as_exception(error)
            # Some versions of verifiers want a semaphore, and others have no such argument.
            takes_semaphore = "score_sem" in inspect.signature(made.rubric.score_rollout).parameters
            await made.rubric.score_rollout(state, **({"score_sem": contextlib.nullcontext()} if takes_semaphore else {}))
        if failures:
            raise RuntimeError(f"a reward function raised {type(failures[0]).__name__}: {failures[0]}") from failures[0]
        metrics = {str(name): float(value) for name, value in (state.get("metrics") or {}).items() if isinstance(value, int | float)}
        return StepResult(state["reward"], info=metrics, truncated=bool(state.get("is_truncated")))


def verifiers_agent(spec: str, name: str, make: Callable[[], Any], module: str) -> type[VerifiersAgent]:
    """Return the class of the episodes of an environment that `make` makes."""
    body = {"make": staticmethod(make), "spec": spec, "__module__": module}
    return type(class_name(name, "Verifiers"), (VerifiersAgent,), body)


def _tasks(rows: Iterable[Mapping[str, Any]]) -> list[Task]:
    tasks = []
    for number, row in enumerate(rows):
        prompt = row["prompt"]
        as_text = isinstance(prompt, str) or not all(isinstance(message.get("content"), str) for message in prompt)
        shown: Prompt = str(prompt) if as_text else [cast("Message", dict(message)) for message in prompt]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt  # rollouts of chats refuse a text
        metadata = {ROW: {**row, "prompt": asked}, "kind": str(row.get("task", ""))}
        tasks.append(Task(shown, label=row.get("answer"), id=str(row.get("example_id", number)), metadata=metadata))
    return tasks


def _check(spec: str, made: Any) -> None:
    missing = [name for name in ("rollout", "rubric", "get_dataset", "get_eval_dataset") if not hasattr(made, name)]
    if missing:
        problem = f"{LOADER} returned a {type(made).__name__} without {missing[0]}"
        raise EnvLoadError(FLAG, spec, problem, "It must return an environment of verifiers 0.1.")
    if getattr(made, "message_type", "chat") != "chat":
        problem = f"its message_type is {made.message_type!r}, and the endpoint has no text completions"
        raise EnvLoadError(FLAG, spec, problem, "Use an environment with message_type='chat'.")
    grouped = [name for rubric in _rubrics(made.rubric) for name in getattr(rubric, "_get_group_reward_func_names", list)()]
    if grouped:
        problem = f"the reward function {grouped[0]} judges a group of rollouts together, and episodes are judged one by one"
        raise EnvLoadError(FLAG, spec, problem, "Use reward functions of a single rollout.")


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric, or those that it consists of."""
    parts = getattr(rubric, "rubrics", None)
    return [rubric] if parts is None else [inner for part in parts for inner in _rubrics(part)]


def _watch(rubric: Any) -> None:
    """Have the reward functions note what they raise."""
    for part in _rubrics(rubric):
        if hasattr(part, "funcs"):
            part.funcs = [_noting(function) for function in part.funcs]


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def judge(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:
            _failures.get([]).append(error)
            raise

    return judge


def _as_exception(error: Any) -> BaseException | None:
    return error if isinstance(error, BaseException) else None


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """While this lasts nobody sets signal handlers: an environment of verifiers sets its own, which end the process at once."""
    setter = signal.signal
    signal.signal = lambda signalnum, handler: signal.getsignal(signalnum)
    try:
        yield
    finally:
        signal.signal = setter
