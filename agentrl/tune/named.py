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
from operator import itemgetter
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
        columns: Columns that a row of it has, separated by commas.
        recast: The rows in our own columns that a row gives; none, if it says nothing of what is to be learned.
        without: Columns that a row of it has not.
        about: Columns that it is known by, as they are shown, where these are not just `columns`.
        test: True for a row of this form, of those that have the columns.
        join: Rows that belong together -> one; `None` if each stands for itself.
    """

    name: str
    kinds: tuple[str, ...]
    columns: str
    recast: Callable[[Row], list[Row]]
    without: tuple[str, ...] = ()
    about: str = ""
    test: Callable[[Row], bool] = bool
    join: Callable[[Iterable[Item]], Iterator[Item]] | None = None

    def matches(self, row: Row) -> bool:
        """Return True for a row of this form."""
        has_columns = all(row.get(name) is not None for name in self.columns.split(", "))
        return has_columns and not any(name in row for name in self.without) and self.test(row)


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
        raise RowError(form.about or form.columns, f"is not of the form {form.name}: {type(error).__name__}: {error}") from error


def _text(row: Row, name: str, below: str = "") -> str:
    """Return the text of a column, and below it that of another one where there is any."""
    value = row.get(name)
    if not isinstance(value, str):
        raise RowError(name, f"is no text: {value!r:.80}")
    return "\n".join(part for part in (value, row.get(below)) if part) if below else value


def _texts(**ours: str) -> Callable[[Row], list[Row]]:
    """Return a function that makes our columns of texts in others, of one column or of two (``question + context``)."""
    return lambda row: [{name: _text(row, *theirs.split(" + ")) for name, theirs in ours.items()}]


def _renamed(**ours: str) -> Callable[[Row], list[Row]]:
    return lambda row: [{name: row[theirs] for name, theirs in ours.items()}]


# Alpaca and its descendants: https://github.com/tatsu-lab/stanford_alpaca

_alpaca = _texts(prompt="instruction + input", completion="output")


# ShareGPT: `conversations` of `from` and `value`, with pairs and labels as LLaMA-Factory documents them.


def _sharegpt_pair(row: Row) -> list[Row]:
    answers = {name: [row[name]] if isinstance(row[name], Mapping) else row[name] for name in ("chosen", "rejected")}
    return [{"prompt": row["conversations"], **answers}]


# ms-swift: `conversation` of `human` and `assistant`, rejected answers beside a whole chat; LLaMA-Factory's chats under names of their own.

TURN = {"human": "user", "assistant": "assistant"}


def _conversation(row: Row) -> list[Row]:
    turns = row["conversation"]
    if not is_list(turns) or not all(isinstance(turn, Mapping) and turn.keys() == TURN.keys() for turn in turns):
        raise RowError("conversation", f"is no list of objects with {' and '.join(TURN)}: {turns!r:.80}")
    return [{"messages": [{"role": role, "content": turn[name]} for turn in turns for name, role in TURN.items()]}]


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


def _best_and_worst(prompt: Any, rated: Sequence[tuple[float, str]]) -> list[Row]:
    """Return the pair of the best answer and the worst; nothing, if all are as good."""
    best, worst = max(rated, key=itemgetter(0)), min(rated, key=itemgetter(0))
    return [{"prompt": prompt, "chosen": best[1], "rejected": worst[1]}] if best[0] > worst[0] else []


def _is_chats_beside_prompt(row: Row) -> bool:
    chats = row["chosen"], row["rejected"]
    are_chats = all(is_list(chat) and len(chat) > 1 and all(isinstance(item, Mapping) for item in chat) for chat in chats)
    return isinstance(row["prompt"], str) and are_chats


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


def _compared(prompt: str, first: str, second: str, by: str, lean: Callable[[Any], float] = float) -> Callable[[Row], list[Row]]:
    """Return a function that makes a pair of two answers: `lean` of column `by` is above 0 if the second is better, below if the first."""

    def pair(row: Row) -> list[Row]:
        strength = lean(row[by])
        return _best_and_worst(row[prompt], [(-strength, _text(row, first)), (strength, _text(row, second))])

    return pair


# HH-RLHF (Anthropic): whole dialogues as text.

SPEAKER = re.compile(r"\n\n(Human|Assistant):")
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def _is_dialogues(row: Row) -> bool:
    return all(isinstance(row[name], str) and row[name].startswith("\n\nHuman:") for name in ("chosen", "rejected"))


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
    question, label = row["question"], row["label"]
    return isinstance(question, Mapping) and "problem" in question and isinstance(label, Mapping) and "steps" in label


def _response(row: Row) -> list[Row]:
    return [{**{name: value for name, value in row.items() if name != "response"}, "completion": row["response"]}]


CHAT, BOTH = ("messages", "completion"), ("pairs", "labelled")
FORMS = (
    NamedForm("alpaca", ("dialogue",), "instruction, output", _alpaca, CHAT, about="instruction, input, output"),
    NamedForm("alpaca", BOTH, "instruction, chosen, rejected",
              _texts(prompt="instruction + input", chosen="chosen", rejected="rejected"), ("prompt",)),
    NamedForm("alpaca", ("labelled",), "instruction, output, kto_tag", lambda row: [{**_alpaca(row)[0], "label": row["kto_tag"]}]),
    NamedForm("sharegpt", ("dialogue",), "conversations", _renamed(messages="conversations"), CHAT),
    NamedForm("sharegpt", ("pairs",), "conversations, chosen, rejected", _sharegpt_pair),
    NamedForm("sharegpt", ("labelled",), "conversations, kto_tag", lambda row: _labelled_chat(row["conversations"], row["kto_tag"])),
    NamedForm("labelled chat", ("labelled",), "messages, label", lambda row: _labelled_chat(row["messages"], row["label"]), ("prompt",)),
    NamedForm("conversation", ("dialogue",), "conversation", _conversation, CHAT, about="conversation of human and assistant"),
    NamedForm("chosen and rejected messages", BOTH, "chosen_messages, rejected_messages",
              _renamed(chosen="chosen_messages", rejected="rejected_messages")),
    NamedForm("chat and rejected messages", BOTH, "messages, rejected_messages",
              _renamed(chosen="messages", rejected="rejected_messages"), ("label",)),
    NamedForm("chat and rejected response", BOTH, "messages, rejected_response", _rejected_response, ("label",)),
    NamedForm("query and responses", BOTH, "query, response, rejected_response",
              _texts(prompt="query", chosen="response", rejected="rejected_response")),
    NamedForm("ultrafeedback", ("dialogue",), "instruction, completions",
              lambda row: [{"prompt": _text(row, "instruction"), "completion": max(_rated(row), key=itemgetter(0))[1]}], CHAT),
    NamedForm("ultrafeedback", ("pairs",), "instruction, completions",
              lambda row: _best_and_worst(_text(row, "instruction"), _rated(row))),
    NamedForm("ultrafeedback of H4", BOTH, "prompt, chosen, rejected", _chats,
              about="prompt, and chosen and rejected chats", test=_is_chats_beside_prompt),
    NamedForm("helpsteer", ("pairs",), "prompt, response, helpfulness",
              lambda row: _best_and_worst(_text(row, "prompt"), row["rated"]) if row["rated"] else [], join=_joined_by_prompt),
    NamedForm("helpsteer preferences", ("pairs",), "prompt, response_1, response_2, preference_strength",
              _compared("prompt", "response_1", "response_2", by="preference_strength")),
    NamedForm("helpsteer3 preferences", BOTH, "context, response1, response2, overall_preference",
              _compared("context", "response1", "response2", by="overall_preference")),
    # PKU-SafeRLHF has the number of the better answer, SHP (Stanford) 1 if it is the first and 0 if it is the second.
    NamedForm("pku-saferlhf", BOTH, "prompt, response_0, response_1, better_response_id",
              _compared("prompt", "response_0", "response_1", "better_response_id",
                        lambda number: {0: -1.0, 1: 1.0}.get(int(number), 0.0))),
    NamedForm("shp", BOTH, "history, human_ref_A, human_ref_B, labels",
              _compared("history", "human_ref_A", "human_ref_B", "labels", lambda first: 1.0 - 2.0 * float(first))),
    # Answers under other names: dolly (databricks), OpenOrca, GSM8K, MetaMathQA, NuminaMath; pairs of Intel's orca_dpo.
    NamedForm("orca pairs", BOTH, "question, chosen, rejected",
              _texts(prompt="question + context", chosen="chosen", rejected="rejected"), ("prompt",)),
    NamedForm("dolly", ("dialogue",), "instruction, response", _texts(prompt="instruction + context", completion="response"), CHAT),
    *(NamedForm(f"{question} and {answer}", ("dialogue",), f"{question}, {answer}",
                _texts(prompt=f"{question} + context", completion=answer), CHAT)
      for question, answer in (("question", "response"), ("question", "answer"), ("query", "response"), ("problem", "solution"))),
    NamedForm("hh-rlhf", BOTH, "chosen, rejected", lambda row: [{name: _spoken(row[name]) for name in ("chosen", "rejected")}],
              ("prompt",), about="chosen and rejected dialogues as text", test=_is_dialogues),
    NamedForm("prompt and response", ("dialogue", "labelled"), "prompt, response", _response, CHAT),
    NamedForm("prm800k", ("steps",), "question, label", _prm800k, test=_is_prm800k),
    NamedForm("math-shepherd", ("steps",), "input, label", _math_shepherd, ("completions",)),
)  # fmt: skip
"""The published forms; the first that matches is taken."""
