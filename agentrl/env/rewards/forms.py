"""Ways in which users write a reward function, told apart by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from agentrl.core.errors import ConfigError
from agentrl.env.agent import StepState
from agentrl.env.results import bad_result

Kind: TypeAlias = Literal["plain", "openrlhf", "trl", "verl"]

FORMS = "Write reward(completion, label) -> float, or reward_func(queries, prompts, labels) -> {'rewards': [...]}."
COMPLETION = ("completion", "response", "answer", "action", "output", "text", "prediction", "solution_str")
LABEL = ("label", "labels_", "target", "expected", "reference", "gold", "ground_truth", "truth", "solution")
OWN = ("prompt", "task", "metadata", "label")
"""Parameters that are taken from the task itself; every other name is a column of its metadata."""
BATCHES = ("queries", "prompts", "responses", "completions", "answers", "outputs", "texts", "solutions", "solution_strs", "labels", "batch")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RewardForm:
    """Parameters of a user's reward function (`named`: passed by name, True with a default), and the form that they show.

    ``plain``: (completion, label, columns...), or `swapped`; ``openrlhf``: (queries, prompts, labels); ``trl``: (completions,
    columns...); ``verl``: (data_source, solution_str, ground_truth, extra_info).
    """

    kind: Kind
    named: Mapping[str, bool]
    takes_all: bool = False
    swapped: bool = False

    def call(self, function: Callable[..., Any], state: StepState, where: str) -> Any:
        """Call `function` for the answer in `state`, with lists of one entry; `EnvResultError` if the task lacks a column it asks for."""
        answer, label, prompt = state.action_text, state.label, state.observation_text
        if self.kind == "openrlhf":
            return function([prompt + answer], [prompt], [label])
        columns = self._columns(state, where)
        if self.kind == "verl":
            return function(**columns)
        if self.kind == "plain":
            return function(*((label, answer) if self.swapped else (answer, label)), **columns)
        chat = not isinstance(state.task.prompt, str)
        completion = [{"role": "assistant", "content": answer}] if chat else answer
        return function(**{name: [value] for name, value in columns.items()}, completions=[completion])

    def reads_label(self, columns: Container[str]) -> bool:
        """Return True if a call for a task with these `columns` gives the function the task's label."""
        return self.kind != "trl" or any(name == "label" or (name in LABEL and name not in columns) for name in self.named)

    def _columns(self, state: StepState, where: str) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        task = state.task
        known = {**task.metadata, "label": state.label, "prompt": task.prompt, "task": task, "metadata": dict(task.metadata)}
        if self.kind == "trl":
            known |= {"prompts": task.prompt}
        if self.kind == "verl":
            source = task.metadata.get("data_source", task.metadata.get("source", ""))
            extra = {"extra_info": task.metadata.get("extra_info", dict(task.metadata)), "data_source": source}
            known |= {"solution_str": state.action_text, "ground_truth": state.label, **extra}
        if self.kind == "trl":
            known |= {name: state.label for name in LABEL if name in self.named and name not in known}
        chosen = {name: known[name] for name in self.named if name in known}
        for name, optional in self.named.items():
            if name not in known and not optional:
                there = ", ".join(sorted(task.metadata)) or "none"
                raise bad_result(where, f"parameter {name!r}", None, f"task {task.id!r} has no such column (its columns: {there})")
        return chosen | ({name: value for name, value in task.metadata.items() if name not in chosen} if self.takes_all else {})


def form_of(function: Callable[..., Any], where: str) -> RewardForm:
    """Return the form of a reward function; `ConfigError` names the parameter that fits no form (`where`: file and name, for messages)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        # Functions that are written in C may have no signature.
        return RewardForm("plain", {})
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    listed = [p for p in parameters if p.kind in (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
    names = [parameter.name for parameter in listed]
    optional = {p.name: p.default is not inspect.Parameter.empty for p in listed}
    if names[:1] == ["queries"] or (getattr(function, "__name__", "") == "reward_func" and "completions" not in names):
        return _openrlhf(parameters, names, where)
    if "completions" in names:
        return RewardForm("trl", {name: optional[name] for name in names if name != "completions"}, takes_all)
    if "solution_str" in names and "ground_truth" in names:
        return RewardForm("verl", optional, takes_all)
    return _plain(parameters, optional, takes_all, where)


def _openrlhf(parameters: list[inspect.Parameter], names: list[str], where: str) -> RewardForm:
    needed = [p for p in parameters if p.kind in POSITIONAL and p.default is inspect.Parameter.empty]
    open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(needed) > 3 or (len([p for p in parameters if p.kind in POSITIONAL]) < 3 and not open_ended):
        raise ConfigError(where, f"({', '.join(names)})", "reward_func takes queries, prompts and labels", FORMS)
    return RewardForm("openrlhf", {})


def _plain(parameters: list[inspect.Parameter], optional: Mapping[str, bool], takes_all: bool, where: str) -> RewardForm:
    positional = [p.name for p in parameters if p.kind in POSITIONAL]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) and len(positional) < 2:
        return RewardForm("plain", {})
    shown = f"({', '.join(p.name for p in parameters)})"
    for name in positional:
        if name in BATCHES:
            problem = f"the parameter {name!r} stands for a list, and the others do not say in which form"
            raise ConfigError(where, shown, problem, f"{FORMS} TRL's form has completions, verl's solution_str and ground_truth.")
    if len(positional) < 2:
        raise ConfigError(where, shown, "takes no completion and label", FORMS)
    named = {name: optional[name] for name in optional if name not in positional[:2]}
    return RewardForm("plain", named, takes_all, swapped=positional[0] in LABEL and positional[1] in COMPLETION)
