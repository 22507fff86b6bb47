"""Checks of user results: nothing a user returns is trusted, and every result is brought into one form here."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast

from agentrl.core.errors import EnvResultError
from agentrl.core.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Message, Prompt
from agentrl.env.agent import ResetResult, StepResult
from agentrl.env.images import image_texts

MAX_TEXT = 2**20
MAX_NAME = 200  # characters of a metric's name
MAX_STATE_KEY = 1000
MAX_MESSAGE = 2000  # characters of a user's exception that are shown
MAX_NUMBER = 1e30  # sums of such numbers are still finite in float32
SCORE_SLACK = 1e-6  # a float32 mean of ones may exceed 1 by this much

RESET_KEYS = ("observation", "sampling_params", "extra_logs", "environment_images")
GIVEN_KEYS = ("label", "task", "seed")  # in what `reset` was given, which it may hand back
STEP_KEYS = ("rewards", "scores", "environment_feedback", "done", "sampling_params", "extra_logs", "environment_images")
STEP_FIELDS, RESET_FIELDS = (tuple(field.name for field in fields(form)) for form in (StepResult, ResetResult))
STEP_NAMES = {
    "rewards": "reward",
    "scores": "score",
    "environment_feedback": "observation",
    "done": "terminated",
    "sampling_params": "sampling",
    "extra_logs": "info",
    "environment_images": "images",
}
"""Key of a dictionary -> field of `StepResult` that means the same."""
OTHER_NAMES = {**STEP_NAMES, "obs": "observation"}
"""Names in other systems, and in dictionaries, of fields of the results."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed")

NEEDS_ONE = "the episode is not over, so the model needs one; or set terminated=True"

NOTHING: Mapping[str, Any] = MappingProxyType({})

_ROLE = re.compile(r"[A-Za-z][\w-]*")  # templates put it between the brackets of control tokens
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


class RawText(str):
    """An observation that goes into the context as it is, without the chat template; control tokens in it count."""

    __slots__ = ()


def check_reset(value: Any, where: str, prompt: Prompt, agents: Sequence[str] = ()) -> ResetResult:
    """Check and normalise what `reset` returned: a `ResetResult`, a dictionary in OpenRLHF's form, or `None`; else `EnvResultError`.

    The observation of the result is `None` (the task's `prompt`, also for one equal to it), `RawText` or a tuple of messages.
    """
    if value is None:
        return ResetResult()
    if isinstance(value, ResetResult):
        given = value.observation
        same = given is None or (not agents and _same(given, prompt))
        observation = None if same else _chat(given, where, "observation")
        info, sampling, images = value.info, value.sampling, value.images
        agent = None if value.agent is None else _agent(value.agent, agents, where, "agent")
        openings = _by_agent(value.observations, agents, where, "observations")
        key = _state_key(value.state_key, where)
    elif isinstance(value, Mapping):
        known_keys(value, (*RESET_KEYS, *GIVEN_KEYS), where)
        given = value.get("observation")
        observation = None if given is None or _same(given, prompt) else _raw(given, where, "observation")
        info, sampling, images = _none_as(value, "extra_logs", {}), value.get("sampling_params"), _none_as(value, "environment_images", ())
        agent, openings, key = None, {}, None
    else:
        raise bad_result(where, "result", value, "return a ResetResult, a dictionary with observation, or None")
    return ResetResult(
        observation,
        info=_numbers(info, where, "info"),
        sampling=check_sampling(sampling, where),
        images=_images(images, where),
        agent=agent,
        observations={name: _chat(opening, where, f"observations[{name!r}]") for name, opening in openings.items()},
        state_key=key,
    )


def check_step(value: Any, where: str, agents: Sequence[str] = (), given: Mapping[str, Any] = NOTHING) -> StepResult:
    """Check and normalise what `step` returned: a `StepResult`, or a dictionary in OpenRLHF's form; else `EnvResultError`.

    Numbers in the result are finite floats; the observation is `None` (only at the end, or with several agents), `RawText` or a tuple
    of messages. `given` are sampling settings that `step` was given and may hand back, whatever they are.
    """
    if isinstance(value, StepResult):
        result = _check_typed_step(value, where, agents, given)
    elif isinstance(value, Mapping):
        result = _check_step_dict(value, where, given)
    else:
        raise bad_result(where, "result", value, "return a StepResult, or a dictionary with rewards, done and environment_feedback")
    if result.observation is None and not agents and not (result.terminated or result.truncated):
        raise bad_result(where, "observation", None, NEEDS_ONE)
    return result


def _check_typed_step(value: StepResult, where: str, agents: Sequence[str], given: Mapping[str, Any]) -> StepResult:
    if _is_plain(value):  # most are, and the checks of what they leave out would take longer than those of the rest
        return StepResult(
            reward=number(value.reward, where, "reward"),
            observation=None if value.observation is None else _chat(value.observation, where, "observation"),
            terminated=_flag(value.terminated, where, "terminated"),
            truncated=_flag(value.truncated, where, "truncated"),
        )
    rewards, scores = (_by_agent(getattr(value, field), agents, where, field) for field in ("rewards", "scores"))
    return StepResult(
        reward=number(value.reward, where, "reward"),
        observation=None if value.observation is None else _chat(value.observation, where, "observation"),
        terminated=_flag(value.terminated, where, "terminated"),
        truncated=_flag(value.truncated, where, "truncated"),
        score=None if value.score is None else _score(value.score, where, "score"),
        info=_numbers(value.info, where, "info"),
        sampling=check_sampling(value.sampling, where, given),
        reward_parts=_numbers(value.reward_parts, where, "reward_parts"),
        images=_images(value.images, where),
        agent=None if value.agent is None else _agent(value.agent, agents, where, "agent"),
        rewards=_numbers(rewards, where, "rewards"),
        scores={name: _score(score, where, f"scores[{name!r}]") for name, score in scores.items()},
        state_key=_state_key(value.state_key, where),
        step_rewards=_step_rewards(value.step_rewards, where),
    )


def _is_plain(value: StepResult) -> bool:
    if value.score is not None or value.sampling is not None or value.agent is not None or value.state_key is not None:
        return False
    others = (value.info, value.reward_parts, value.images, value.rewards, value.scores, value.step_rewards)
    return not any(others) if all(type(each) is dict or type(each) is tuple for each in others) else False


def _step_rewards(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(pair, Sequence) and len(pair) == 2 and _is_length(pair[0]) for pair in value):
        raise bad_result(where, "step_rewards", value, "must be a list of pairs: characters up to the end of a step, from 1, and a number")
    return tuple((pair[0], number(pair[1], where, "step_rewards")) for pair in value)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_step_dict(value: Mapping[str, Any], where: str, given: Mapping[str, Any]) -> StepResult:
    typed = [key for key in value if key in STEP_FIELDS and key not in STEP_KEYS]
    if typed:
        line = f"return StepResult({', '.join(f'{name}=...' for name in _typed_names(value))})"
        meant = next((f"; did you mean {key!r}?" for key, name in STEP_NAMES.items() if name == typed[0]), ", as only a StepResult has it.")
        raise bad_result(where, "result", value, f"has the unknown key {typed[0]!r}{meant} In the typed form write: {line}")
    known_keys(value, STEP_KEYS, where)
    if "rewards" not in value:
        raise bad_result(where, "result", value, "the key 'rewards' is missing")
    scores = value.get("scores")
    return StepResult(
        number(value["rewards"], where, "rewards"),
        _raw(_none_as(value, "environment_feedback", ""), where, "environment_feedback"),
        terminated=_flag(value.get("done", False), where, "done"),
        score=None if scores is None else clipped_score(scores, where, "scores"),
        info=_numbers(_none_as(value, "extra_logs", {}), where, "extra_logs"),
        sampling=check_sampling(value.get("sampling_params"), where, given),
        images=_images(_none_as(value, "environment_images", ()), where),
    )


def number(value: Any, where: str, field: str) -> float:
    """Return a finite float from a number, or from an array, tensor or list of exactly one, else raise `EnvResultError`."""
    plain = value
    if isinstance(plain, list | tuple) and len(plain) == 1:
        plain = plain[0]
    if not isinstance(plain, int | float) and callable(getattr(plain, "item", None)):
        try:
            plain = plain.item()
        except Exception:  # each array library has its own error for "more than one element"
            shape = getattr(plain, "shape", None)
            raise bad_result(where, field, value, f"must be one number, has shape {tuple(shape) if shape is not None else '?'}") from None
    if not isinstance(plain, int | float):
        raise bad_result(where, field, value, "must be a number")
    try:
        result = float(plain)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise bad_result(where, field, value, "must be finite")
    if abs(result) > MAX_NUMBER:
        raise bad_result(where, field, value, f"must be between {-MAX_NUMBER:g} and {MAX_NUMBER:g}, because training computes in float32")
    return result


def check_sampling(value: Any, where: str, given: Mapping[str, Any] = NOTHING) -> Mapping[str, Any] | None:
    """Check sampling settings that a user changed; keys whose value is `None`, or the one that was given, are left out."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad_result(where, "sampling", value, "must be a dictionary of sampling settings")
    known_keys(value, SAMPLING_KEYS, where, "sampling")
    changed = {key: item for key, item in value.items() if item is not None and not (key in given and item == given[key])}
    return {key: _sampling_value(key, item, where) for key, item in changed.items()}


def _sampling_value(key: str, value: Any, where: str) -> Any:
    field = f"sampling[{key!r}]"
    if key == "stop":
        texts = (value,) if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
            raise bad_result(where, field, value, "must be a text or a list of texts, none of them empty")
        return tuple(texts)
    if key == "stop_token_ids":
        if not isinstance(value, Sequence) or not all(isinstance(item, int) and item >= 0 for item in value):
            raise bad_result(where, field, value, "must be a list of token ids")
        return tuple(value)
    return _sampling_number(key, number(value, where, field), value, where)


def _sampling_number(key: str, checked: float, value: Any, where: str) -> int | float:
    field = f"sampling[{key!r}]"
    if key == "temperature" and not MIN_TEMPERATURE <= checked <= MAX_TEMPERATURE:
        raise bad_result(where, field, value, f"must be from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, where engines sample")
    if key == "top_p" and not 0 < checked <= 1:
        raise bad_result(where, field, value, "must be above 0 and at most 1")
    if key in ("temperature", "top_p"):
        return checked
    low, high = {"top_k": (-1, 2**31 - 1), "max_tokens": (1, 2**31 - 1), "seed": (0, 2**63 - 1)}[key]
    whole = value if isinstance(value, int) else int(checked)  # a float does not hold every seed
    if checked != int(checked) or not low <= whole <= high:
        raise bad_result(where, field, value, f"must be a whole number, from {low} to {high}")
    return max(whole, 0) if key == "top_k" else int(whole)


def _same(observation: Any, prompt: Prompt) -> bool:
    if isinstance(prompt, str):
        return isinstance(observation, str) and observation == prompt
    return isinstance(observation, list | tuple) and list(observation) == list(prompt)


def _chat(value: Any, where: str, field: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (Message(role="user", content=_text(value, where, field)),)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise bad_result(where, field, value, "must be text or a list of chat messages")
    for index, message in enumerate(value):
        _check_message(message, where, f"{field}[{index}]")
    if sum(_text_size(message) for message in value) > MAX_TEXT:
        raise bad_result(where, field, value, f"is longer than {MAX_TEXT} characters")
    return tuple(cast("Message", dict(message)) for message in value)


def _check_message(message: Any, where: str, field: str) -> None:
    if not isinstance(message, Mapping):
        raise bad_result(where, field, message, "must be a message with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise bad_result(where, f"{field}['role']", role, "must be a word such as 'user' or 'tool'")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
        raise bad_result(where, f"{field}['content']", content, "must be text or a list of content parts")


def _agent(value: Any, agents: Sequence[str], where: str, field: str) -> str:
    """The name of an agent, which must be one of the environment's."""
    if not agents:
        raise bad_result(where, field, value, 'the environment names no agents; set the class attribute agents = ("buyer", "seller")')
    if value not in agents:
        close = difflib.get_close_matches(str(value), agents, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(agents)}"
        raise bad_result(where, field, value, f"is none of the environment's agents; {hint}")
    return str(value)


def _by_agent(value: Any, agents: Sequence[str], where: str, field: str) -> Mapping[str, Any]:
    if type(value) is dict and not value:
        return {}
    if not isinstance(value, Mapping):
        raise bad_result(where, field, value, "must be a dictionary by the agents' names")
    return {_agent(name, agents, where, f"a key of {field}"): item for name, item in value.items()}


def _text_size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_text_size, value.values()))
    return sum(map(_text_size, value)) if isinstance(value, list | tuple) else 0


def _raw(value: Any, where: str, field: str) -> Any:
    """Raw text of the dictionary form; a list of messages, such as a chat prompt handed back, stays one."""
    return RawText(_text(value, where, field)) if isinstance(value, str) else _chat(value, where, field)


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise bad_result(where, field, value, "must be text")
    if len(value) > MAX_TEXT:
        raise bad_result(where, field, value, f"is longer than {MAX_TEXT} characters ({len(value)})")
    return value


def _state_key(value: Any, where: str) -> str | None:
    if value is None or (isinstance(value, str) and len(value) <= MAX_STATE_KEY):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    problem = f"must be a text of at most {MAX_STATE_KEY} characters or a whole number; hash what is larger"
    raise bad_result(where, "state_key", value, problem)


def _flag(value: Any, where: str, field: str) -> bool:
    if isinstance(value, bool):
        return value
    checked = number(value, where, field)
    if checked not in (0.0, 1.0):
        raise bad_result(where, field, value, "must be True or False")
    return bool(checked)


def _score(value: Any, where: str, field: str) -> float:
    checked = number(value, where, field)
    if not -SCORE_SLACK <= checked <= 1 + SCORE_SLACK:
        raise bad_result(where, field, value, "must lie in 0..1; it says how well the task was done, whatever the reward's scale")
    return min(max(checked, 0.0), 1.0)


def clipped_score(value: Any, where: str, field: str) -> float:
    """Clip a score of OpenRLHF's forms, which often is the reward again on any scale, to 0..1, as the reward would be without it."""
    return min(max(number(value, where, field), 0.0), 1.0)


def _numbers(value: Any, where: str, field: str) -> dict[str, float]:
    if type(value) is dict and not value:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise bad_result(where, field, value, "must be a dictionary of names and numbers")
    for key in value:
        if len(key) > MAX_NAME or not key.isprintable():
            raise bad_result(where, f"a key of {field}", key, f"must be at most {MAX_NAME} printable characters")
    return {key: number(item, where, f"{field}[{key!r}]") for key, item in value.items()}


def _images(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, tuple) and not value:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise bad_result(where, "images", value, "must be a list of images")
    try:
        return image_texts(value)
    except ValueError as error:
        raise bad_result(where, "images", value, str(error)) from error


def _none_as(value: Mapping[str, Any], key: str, default: Any) -> Any:
    found = value.get(key)
    return default if found is None else found


def known_keys(value: Mapping[Any, Any], known: Iterable[str], where: str, field: str = "result") -> None:
    """Refuse keys that nobody reads; they are usually misspelt."""
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
            raise bad_result(where, field, value, f"has the unknown key {key!r}; {hint}")


def bad_result(where: str, field: str, value: Any, problem: str) -> EnvResultError:
    """Return the error for a value that cannot be used: who returned it, in which field, its text, and the problem."""
    try:
        shown = " ".join(_repr.repr(value).encode(errors="backslashreplace").decode().split())
    except Exception:  # a user's __repr__ may raise anything
        shown = f"<{type(value).__name__}>"
    if not isinstance(value, str | int | float | None | Mapping):
        shown = f"{shown} ({type(value).__name__})"
    return EnvResultError(f"{where} returned {field} = {shown}: {problem}")


def said(error: BaseException) -> str:
    """Type and message of a user's exception: cut, and whatever its ``__str__`` does."""
    try:
        message = str(error)[: MAX_MESSAGE + 1].encode(errors="backslashreplace").decode()
    except Exception:
        message = "(its message cannot be shown)"
    cut = f"{message[:MAX_MESSAGE]}..." if len(message) > MAX_MESSAGE else message + _meant(message)
    return f"{type(error).__name__}: {cut}" if cut else type(error).__name__


def _typed_names(value: Mapping[str, Any]) -> list[str]:
    """Return the fields of `StepResult` for the keys of a dictionary, as far as they have any."""
    named = (OTHER_NAMES.get(key, key) for key in value)
    return list(dict.fromkeys(name for name in named if name in STEP_FIELDS))


def _meant(message: str) -> str:
    """Return which field was meant by one that `StepResult` or `ResetResult` does not have; "" for any other message."""
    unknown = re.match(r"(StepResult|ResetResult)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    if unknown is None:
        return ""
    known = STEP_FIELDS if unknown[1] == "StepResult" else RESET_FIELDS
    meant = OTHER_NAMES.get(unknown[2]) or next(iter(difflib.get_close_matches(unknown[2], known, n=1)), "")
    return f"; did you mean {meant}?" if meant in known else f"; there are {', '.join(known)}"
