"""Forms in which known data sets are published, detected by their columns and turned into rows of our own columns. Loads no model library.

A form stands beside the fact that its authors document. What stays the same in all forms, roles and parts of messages, is read in
`agentrl.tune.forms`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from agentrl.config.tune import TuneDataConfig
from agentrl.tune.columns import SHARED, Columns, Row, RowError, is_list

Item: TypeAlias = tuple[str, Columns]
"""Position of a row, for messages, and its columns."""

STEP_MARK = "ки"
"""Stands at the end of each step in Math-Shepherd."""


@dataclass(frozen=True, slots=True)
class NamedForm:
    """A published form of rows.

    Attributes:
        name: Name that users know it by.
        kinds: Keys of `agentrl.tune.forms.PARSERS` that it can serve.
        shown: Columns that it is known by, as they are shown.
        matches: True for a row of this form.
        recast: The rows in our own columns that a row gives; none, if it says nothing of what is to be learned.
        join: Rows that belong together -> one; `None` if each stands for itself.
    """

    name: str
    kinds: tuple[str, ...]
    shown: str
    matches: Callable[[Row], bool]
    recast: Callable[[Row], list[Row]]
    join: Callable[[Iterable[Item]], Iterator[Item]] | None = None


def named_form(row: Row, data: TuneDataConfig, kind: str) -> NamedForm | None:
    """Return the published form of a row; `None` if it has columns of ours, or the settings name columns or a form."""
    own = all(getattr(data, item.name) == item.default for item in fields(data) if item.name.endswith("_key") or item.name == "form")
    plain = dict(row)  # the forms are tried on it, whose look-ups are not noted
    return next((form for form in FORMS if kind in form.kinds and form.matches(plain)), None) if own else None


def unfolded(row: Row, kind: str) -> Columns:
    """Return a row with the lists that cells of a table hold as JSON text: chats, and the lists of a form with steps."""
    cells = {name: _unfolded(value, kind) if isinstance(value, str) and value.startswith("[") else value for name, value in row.items()}
    return Columns(cells)


def _unfolded(cell: str, kind: str) -> Any:
    try:
        value = json.loads(cell)
    except ValueError:
        return cell
    is_chat = isinstance(value, list) and value and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)
    return value if is_chat or (kind == "steps" and isinstance(value, list)) else cell


def recast(form: NamedForm, row: Columns) -> list[Columns]:
    """Return the rows in our own columns that a row of a published form gives, with the columns that are read in every form.

    Raises:
        RowError: If it is not of that form after all.
    """
    try:
        made = form.recast(row)
        shared = {name: value for name, value in row.unread().items() if name in SHARED}
        return [Columns({**shared, **each}) for each in made]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(form.shown, f"is not of the form {form.name}: {type(error).__name__}: {error}") from error


def _has(*names: str, without: Sequence[str] = ()) -> Callable[[Row], bool]:
    return lambda row: all(row.get(name) is not None for name in names) and not any(name in row for name in without)


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise RowError(name, f"is no text: {value!r:.80}")
    return value


# Alpaca and its descendants: https://github.com/tatsu-lab/stanford_alpaca


def _alpaca_prompt(row: Row) -> str:
    return "\n".join(part for part in (_text(row, "instruction"), row.get("input")) if part)


def _alpaca(row: Row) -> list[Row]:
    return [{"prompt": _alpaca_prompt(row), "completion": _text(row, "output")}]


def _alpaca_pair(row: Row) -> list[Row]:
    return [{"prompt": _alpaca_prompt(row), "chosen": _text(row, "chosen"), "rejected": _text(row, "rejected")}]


def _alpaca_label(row: Row) -> list[Row]:
    return [{**_alpaca(row)[0], "label": _tag(row)}]


def _tag(row: Row) -> Any:
    return row["kto_tag"] if "kto_tag" in row else row["label"]


# ShareGPT: `conversations` of `from` and `value`, with pairs and labels as LLaMA-Factory documents them.


def _sharegpt(row: Row) -> list[Row]:
    return [{"messages": row["conversations"]}]


def _sharegpt_pair(row: Row) -> list[Row]:
    answers = {name: [row[name]] if isinstance(row[name], Mapping) else row[name] for name in ("chosen", "rejected")}
    return [{"prompt": row["conversations"], **answers}]


def _sharegpt_label(row: Row) -> list[Row]:
    return _labelled_chat(row["conversations"], _tag(row))


# ms-swift: `conversation` of `human` and `assistant`, rejected answers beside a whole chat; LLaMA-Factory's chats under names of their own.

TURN = {"human": "user", "assistant": "assistant"}


def _conversation(row: Row) -> list[Row]:
    turns = row["conversation"]
    if not is_list(turns) or not all(isinstance(turn, Mapping) and turn.keys() == TURN.keys() for turn in turns):
        raise RowError("conversation", f"is no list of objects with {' and '.join(TURN)}: {turns!r:.80}")
    return [{"messages": [{"role": role, "content": turn[name]} for turn in turns for name, role in TURN.items()]}]


def _chat_pair(chosen: str, rejected: str) -> Callable[[Row], list[Row]]:
    return lambda row: [{"chosen": row[chosen], "rejected": row[rejected]}]


def _rejected_response(row: Row) -> list[Row]:
    *prompt, chosen = row["messages"]
    return [{"prompt": prompt, "chosen": [chosen], "rejected": _text(row, "rejected_response")}]


def _labelled_chat(messages: Any, label: Any) -> list[Row]:
    if not is_list(messages) or len(messages) < 2:
        raise RowError("messages", "is no chat that ends with an answer")
    return [{"prompt": list(messages[:-1]), "completion": [messages[-1]], "label": label}]


# UltraFeedback: four answers with scores (openbmb), and chosen and rejected chats beside a prompt in text (HuggingFaceH4).


def _rated(row: Row) -> list[tuple[float, str]]:
    if not is_list(row["completions"]) or not row["completions"]:
        raise RowError("completions", "is no list of answers with scores")
    return [(float(answer["overall_score"]), answer["response"]) for answer in row["completions"]]


def _ultrafeedback(row: Row) -> list[Row]:
    return [{"prompt": _text(row, "instruction"), "completion": max(_rated(row), key=_score)[1]}]


def _ultrafeedback_pair(row: Row) -> list[Row]:
    return _best_and_worst(_text(row, "instruction"), _rated(row))


def _score(rated: tuple[float, str]) -> float:
    return rated[0]


def _best_and_worst(prompt: Any, rated: Sequence[tuple[float, str]]) -> list[Row]:
    """Return the pair of the best answer and the worst; nothing, if all are as good."""
    best, worst = max(rated, key=_score), min(rated, key=_score)
    return [{"prompt": prompt, "chosen": best[1], "rejected": worst[1]}] if best[0] > worst[0] else []


def _is_chats_beside_prompt(row: Row) -> bool:
    return isinstance(row.get("prompt"), str) and all(_is_chat(row.get(name)) for name in ("chosen", "rejected"))


def _is_chat(value: Any) -> bool:
    return is_list(value) and len(value) > 1 and all(isinstance(item, Mapping) for item in value)


def _chats(row: Row) -> list[Row]:
    """Return the chats without the prompt, with which they begin."""
    asked = [message.get("content", message.get("value")) for message in row["chosen"][:-1]]
    if row["prompt"] not in asked:
        raise RowError("prompt", "is not what the chats of column 'chosen' ask", "Leave out the column, or name another with --prompt-key.")
    return [{name: value for name, value in row.items() if name != "prompt"}]


# HelpSteer (nvidia): answers with ratings, those to a prompt one after the other; HelpSteer2's preferences, -3 (the first answer) to 3.


def _joined_by_prompt(items: Iterable[Item]) -> Iterator[Item]:
    for prompt, group in itertools.groupby(items, key=lambda item: item[1].get("prompt")):
        answers = list(group)
        rated = [(float(row["helpfulness"]), row["response"]) for _, row in answers if "helpfulness" in row and "response" in row]
        others = {name: value for name, value in answers[0][1].items() if name not in ("helpfulness", "response")}
        yield answers[0][0], Columns({**others, "prompt": prompt, "rated": rated})


def _helpsteer(row: Row) -> list[Row]:
    return _best_and_worst(_text(row, "prompt"), row["rated"]) if row["rated"] else []


def _preference(row: Row) -> list[Row]:
    strength = float(row["preference_strength"])
    first, second = _text(row, "response_1"), _text(row, "response_2")
    return _best_and_worst(_text(row, "prompt"), [(-strength, first), (strength, second)])


def _preference3(row: Row) -> list[Row]:
    """HelpSteer3: a chat in `context`, and -3 (the first answer) to 3."""
    strength = float(row["overall_preference"])
    return _best_and_worst(row["context"], [(-strength, _text(row, "response1")), (strength, _text(row, "response2"))])


# Questions with an answer under other names: dolly (databricks), OpenOrca, GSM8K, MetaMathQA, NuminaMath; pairs of Intel's orca_dpo.


def _answered(question: str, answer: str) -> Callable[[Row], list[Row]]:
    return lambda row: [{"prompt": _asked(row, question), "completion": _text(row, answer)}]


def _asked(row: Row, name: str) -> str:
    return "\n".join(part for part in (_text(row, name), row.get("context")) if part)


def _asked_pair(row: Row) -> list[Row]:
    return [{"prompt": _asked(row, "question"), "chosen": _text(row, "chosen"), "rejected": _text(row, "rejected")}]


# Two answers and which is better: PKU-SafeRLHF by its number, SHP (Stanford) by 1 for the first and 0 for the second.


def _numbered(row: Row) -> list[Row]:
    better = int(row["better_response_id"])
    rated = [(float(number == better), _text(row, f"response_{number}")) for number in (0, 1)]
    return _best_and_worst(_text(row, "prompt"), rated)


def _shp(row: Row) -> list[Row]:
    first = float(row["labels"])
    rated = [(first, _text(row, "human_ref_A")), (1.0 - first, _text(row, "human_ref_B"))]
    return _best_and_worst(_text(row, "history"), rated)


# HH-RLHF (Anthropic): whole dialogues as text.

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def _hh(row: Row) -> list[Row]:
    return [{name: _spoken(row[name]) for name in ("chosen", "rejected")}]


def _spoken(text: str) -> list[Row]:
    _, *parts = SPEAKER.split(text)
    return [{"role": SPEAKERS[name], "content": said.strip()} for name, said in zip(parts[::2], parts[1::2], strict=True)]


# PRM800K (openai): at each step several completions with ratings of -1, 0 and 1, of which one was gone on with.


def _prm800k(row: Row) -> list[Row]:
    prompt = row["question"]["problem"]
    found: list[Row] = []
    texts: list[str] = []
    labels: list[bool] = []
    for step in row["label"]["steps"]:
        chosen, said = step.get("chosen_completion"), step.get("completions") or []
        ended = [part for index, part in enumerate(said) if index != chosen and part["rating"] is not None]
        found += [_steps(prompt, [*texts, part["text"]], [*labels, part["rating"] == 1]) for part in ended]
        human = step.get("human_completion")
        if chosen is None and human is None:
            return found
        texts.append(said[chosen]["text"] if chosen is not None else human["text"] if isinstance(human, Mapping) else human)
        labels.append(chosen is None or said[chosen]["rating"] == 1)
    return [*found, _steps(prompt, texts, labels)] if texts else found


def _steps(prompt: str, texts: Sequence[str], labels: Sequence[bool]) -> Row:
    return {"prompt": prompt, "completions": list(texts), "labels": list(labels)}


# Math-Shepherd (peiyi9979): a question and its steps in one text, with a mark at each step's end, in whose place a copy has + or -.


def _math_shepherd(row: Row) -> list[Row]:
    parts = _text(row, "input").split(STEP_MARK)
    marks, place = [], 0
    for part in parts[:-1]:
        place += len(part)
        marks.append(_text(row, "label")[place : place + 1])
        place += 1
    question, first, begun = parts[0].partition("Step 1:")
    if not first or not marks or set(marks) - {"+", "-"}:
        raise RowError("label", f"has no + or - at the end of each step of column 'input', which end with {STEP_MARK}")
    texts = [first + begun, *parts[1:-1]]
    return [_steps(question.strip(), [text.strip() for text in texts], [mark == "+" for mark in marks])]


def _is_prm800k(row: Row) -> bool:
    question, label = row.get("question"), row.get("label")
    return isinstance(question, Mapping) and "problem" in question and isinstance(label, Mapping) and "steps" in label


def _response(row: Row) -> list[Row]:
    return [{**{name: value for name, value in row.items() if name != "response"}, "completion": row["response"]}]


CHAT = ("messages", "completion")
FORMS = (
    NamedForm("alpaca", ("dialogue",), "instruction, input, output", _has("instruction", "output", without=CHAT), _alpaca),
    NamedForm("alpaca", ("pairs", "labelled"), "instruction, chosen, rejected",
              _has("instruction", "chosen", "rejected", without=("prompt",)), _alpaca_pair),
    NamedForm("alpaca", ("labelled",), "instruction, output, kto_tag", _has("instruction", "output", "kto_tag"), _alpaca_label),
    NamedForm("sharegpt", ("dialogue",), "conversations", _has("conversations", without=CHAT), _sharegpt),
    NamedForm("sharegpt", ("pairs",), "conversations, chosen, rejected", _has("conversations", "chosen", "rejected"), _sharegpt_pair),
    NamedForm("sharegpt", ("labelled",), "conversations, kto_tag", _has("conversations", "kto_tag"), _sharegpt_label),
    NamedForm("labelled chat", ("labelled",), "messages, label", _has("messages", "label", without=("prompt",)),
              lambda row: _labelled_chat(row["messages"], row["label"])),
    NamedForm("conversation", ("dialogue",), "conversation of human and assistant", _has("conversation", without=CHAT), _conversation),
    NamedForm("chosen and rejected messages", ("pairs", "labelled"), "chosen_messages, rejected_messages",
              _has("chosen_messages", "rejected_messages"), _chat_pair("chosen_messages", "rejected_messages")),
    NamedForm("chat and rejected messages", ("pairs", "labelled"), "messages, rejected_messages",
              _has("messages", "rejected_messages", without=("label",)), _chat_pair("messages", "rejected_messages")),
    NamedForm("chat and rejected response", ("pairs", "labelled"), "messages, rejected_response",
              _has("messages", "rejected_response", without=("label",)), _rejected_response),
    NamedForm("query and responses", ("pairs", "labelled"), "query, response, rejected_response",
              _has("query", "response", "rejected_response"), lambda row:
              [{"prompt": _text(row, "query"), "chosen": _text(row, "response"), "rejected": _text(row, "rejected_response")}]),
    NamedForm("ultrafeedback", ("dialogue",), "instruction, completions", _has("instruction", "completions", without=CHAT), _ultrafeedback),
    NamedForm("ultrafeedback", ("pairs",), "instruction, completions", _has("instruction", "completions"), _ultrafeedback_pair),
    NamedForm("ultrafeedback of H4", ("pairs", "labelled"), "prompt, and chosen and rejected chats", _is_chats_beside_prompt, _chats),
    NamedForm("helpsteer", ("pairs",), "prompt, response, helpfulness",
              _has("prompt", "response", "helpfulness"), _helpsteer, _joined_by_prompt),
    NamedForm("helpsteer preferences", ("pairs",), "response_1, response_2, preference_strength",
              _has("prompt", "response_1", "response_2", "preference_strength"), _preference),
    NamedForm("helpsteer3 preferences", ("pairs", "labelled"), "context, response1, response2, overall_preference",
              _has("context", "response1", "response2", "overall_preference"), _preference3),
    NamedForm("pku-saferlhf", ("pairs", "labelled"), "prompt, response_0, response_1, better_response_id",
              _has("prompt", "response_0", "response_1", "better_response_id"), _numbered),
    NamedForm("shp", ("pairs", "labelled"), "history, human_ref_A, human_ref_B, labels",
              _has("history", "human_ref_A", "human_ref_B", "labels"), _shp),
    NamedForm("orca pairs", ("pairs", "labelled"), "question, chosen, rejected",
              _has("question", "chosen", "rejected", without=("prompt",)), _asked_pair),
    NamedForm("dolly", ("dialogue",), "instruction, response", _has("instruction", "response", without=CHAT),
              _answered("instruction", "response")),
    NamedForm("question and response", ("dialogue",), "question, response", _has("question", "response", without=CHAT),
              _answered("question", "response")),
    NamedForm("question and answer", ("dialogue",), "question, answer", _has("question", "answer", without=CHAT),
              _answered("question", "answer")),
    NamedForm("query and response", ("dialogue",), "query, response", _has("query", "response", without=CHAT),
              _answered("query", "response")),
    NamedForm("problem and solution", ("dialogue",), "problem, solution", _has("problem", "solution", without=CHAT),
              _answered("problem", "solution")),
    NamedForm("hh-rlhf", ("pairs", "labelled"), "chosen and rejected dialogues as text",
              lambda row: "prompt" not in row and _is_dialogue(row.get("chosen")) and _is_dialogue(row.get("rejected")), _hh),
    NamedForm("prompt and response", ("dialogue", "labelled"), "prompt, response", _has("prompt", "response", without=CHAT), _response),
    NamedForm("prm800k", ("steps",), "question, label", _is_prm800k, _prm800k),
    NamedForm("math-shepherd", ("steps",), "input, label", _has("input", "label", without=("completions",)), _math_shepherd),
)  # fmt: skip
"""The published forms; the first that matches is taken."""
