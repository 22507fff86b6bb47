"""The reader of the fields of a request, the same for every dialect; its errors name the field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.serving import ApiError
from agentrl.env.images import image_in
from agentrl.rollout.endpoint.neutral import Constraint, Json

COMMON = ("top_k", "chat_template_kwargs", "enable_thinking")
"""Fields that every dialect reads, whether its service knows them or not."""
OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logits_processors": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template": (),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
}
"""Fields of some service that would change the tokens, with the values that do not; every dialect refuses them alike."""
MAX_STRINGS, MAX_STRING = 64, 1000
"""Stop strings of a request, and characters of one, at most."""
IMAGES = ("image_url", "input_image", "image")
"""Types of parts that are images, in one dialect or another."""
OMITTED = "[image omitted]"
"""Text that a model reads in place of an image."""


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a request with the place where it stands; every reader raises `ApiError` for a value that cannot be taken."""

    value: Json
    where: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)  # marks and sources of the images of the whole request

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field as it is."""
        return self.value.get(name, default)

    def refused(self, name: str, problem: str, code: str = "unsupported_value") -> ApiError:
        """Return the error for a field, with its value."""
        return _refused(self.get(name), self._place(name), problem, code)

    def check(self, known: Sequence[str], off: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
        """Refuse fields that would change the tokens, unless their value is one that `OFF` or `off` calls harmless.

        Returns:
            Names of the fields that nobody reads, which change nothing.
        """
        ignored = []
        for name, value in self.value.items():
            harmless = off.get(name, OFF.get(name))
            if value is None or name in known or name in COMMON:
                continue
            if harmless is None:
                ignored.append(name)
            elif value not in harmless:
                raise self.refused(name, "cannot be honoured, because the tokens would not be samples of the policy alone; leave it out")
        return tuple(ignored)

    def common(self, *limits: str) -> dict[str, Any]:
        """The arguments of a `ChatRequest` that every dialect has under the same name; `limits` name the fields of the limit of tokens."""
        return {
            "max_tokens": next(filter(None, [self.whole(name) for name in limits]), None),
            "temperature": self.real("temperature"),
            "top_p": self.real("top_p"),
            "top_k": self._top_k(),
            "template_variables": self._template_variables(),
            "stream": bool(self.get("stream")),
            "model": self.text("model", ""),
        }

    def inner(self, name: str) -> Fields:
        """The object of a field; an empty one if there is none."""
        value = self.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refused(name, "must be an object", "invalid_type")
        return Fields(value, self._place(name), self.images)

    def items(self, name: str, *, optional: bool = False) -> list[Fields]:
        """The objects of a list, which may be empty or missing if it is `optional`."""
        value = self.get(name) or [] if optional else self.get(name)
        if not isinstance(value, list) or not (value or optional):
            raise self.refused(name, f"must be a list{'' if optional else ' with at least one item'}", "invalid_type")
        places = [f"{self._place(name)}[{index}]" for index in range(len(value))]
        for item, place in zip(value, places, strict=True):
            if not isinstance(item, Mapping):
                raise _refused(item, place, "must be an object", "invalid_type")
        return [Fields(item, place, self.images) for item, place in zip(value, places, strict=True)]

    def one_of(self, name: str, values: Sequence[str | None], problem: str) -> str:
        """A field with one of a few values, refused with the problem if it has another."""
        if self.get(name) not in values:
            raise self.refused(name, problem)
        return str(self.get(name))

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.refused(name, "must be a string", "invalid_type")
        return value

    def text_of(self, name: str, kinds: Sequence[str] = ("text",)) -> str:
        """Text of a content: a string, nothing, or a list of parts of these kinds."""
        content = self.get(name)
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise self.refused(name, "must be a string or a list of parts", "invalid_type")
        texts = [part if isinstance(part, str) else self._part(name, index, part, kinds) for index, part in enumerate(content)]
        return "\n".join(texts)

    def whole(self, name: str) -> int | None:
        """A positive whole number, or `None` without one."""
        value = self.get(name)
        # `isinstance` would accept True as 1.
        if value is not None and (type(value) is not int or value < 1):
            raise self.refused(name, "must be a whole number of at least 1", "invalid_value")
        return value

    def real(self, name: str) -> float | None:
        """A number that is not negative, or `None` without one."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.refused(name, "must be a number of at least 0", "invalid_value")
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """Strings: one, a list, or none."""
        value = self.get(name)
        items = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise self.refused(name, "must be a string or a list of strings, none of them empty", "invalid_type")
        if len(items) > MAX_STRINGS or any(len(item) > MAX_STRING for item in items):  # all are looked for behind each token
            raise self.refused(name, f"may have {MAX_STRINGS} strings of {MAX_STRING} characters at most", "invalid_value")
        return tuple(items)

    def is_image(self) -> bool:
        """Return True for a part that is an image."""
        return self.get("type") in IMAGES

    def mark(self) -> str:
        """Return the text that stands for the image of a part, which is noted."""
        source = _source(self.value)
        mark = f"[image {hashlib.sha256(source.encode()).hexdigest()[:32]}]"
        self.images.append((mark, source))
        return mark

    def _top_k(self) -> int | None:
        """Number of candidates; 0, for which some services write -1, switches the limit off."""
        value = self.get("top_k")
        if value in (0, -1) and not isinstance(value, bool):
            return 0
        return self.whole("top_k")

    def _template_variables(self) -> Json | None:
        """Variables for the chat template; the one that clients also give by itself is one of them."""
        variables = dict(self.inner("chat_template_kwargs").value)
        if (thinking := self.get("enable_thinking")) is not None:
            if not isinstance(thinking, bool):
                raise self.refused("enable_thinking", "must be true or false", "invalid_type")
            variables.setdefault("enable_thinking", thinking)
        return variables or None

    def _place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def _part(self, name: str, index: int, part: Any, kinds: Sequence[str]) -> str:
        fields = Fields(part if isinstance(part, Mapping) else {}, f"{self._place(name)}[{index}]", self.images)
        if fields.is_image():
            return fields.mark()
        if fields.get("type") not in kinds or not isinstance(fields.get("text"), str):
            raise fields.refused("type", f"only parts of the types {', '.join(kinds)} are taken")
        return fields.text("text")


def _source(part: Json) -> str:
    """Return the image of a part as a data URL, or as the address that it has in its place."""
    given = part.get("source")
    if isinstance(given, Mapping) and given.get("data"):
        return f"data:{given.get('media_type')};base64,{given['data']}"
    found = given.get("url") if isinstance(given, Mapping) else image_in(part)
    return found if isinstance(found, str) else "an image without data"


def constraint_of(choice: Any, choice_field: str, tool: Any, form: Any, form_field: str) -> Constraint | None:
    """Return the form that a request asks for by a choice of tools, and by a form of the text, which a forced call makes idle.

    Args:
        choice: ``auto``, ``none``, ``required``, ``any``, or the whole choice if it names a tool. `None` is ``auto``.
        choice_field: Name of its field.
        tool: Name of the tool that the choice names; `None` without one.
        form: ``{"type": "json_schema", "schema": ...}``, or ``json_object`` or ``text`` without a schema. `None` is ``text``.
        form_field: Name of its field.

    Raises:
        ApiError: If one of them is unknown.
    """
    schema = _schema(form, form_field)
    if tool is not None:
        return Constraint(field=choice_field, must_call=True, tool=Fields({choice_field: tool}).text(choice_field))
    if choice in ("required", "any"):
        return Constraint(field=choice_field, must_call=True)
    if choice not in (None, "auto", "none"):
        raise _refused(choice, choice_field, "must be auto, none, a call of any tool, or the name of one")
    return None if schema is None else Constraint(field=form_field, schema=schema)


def _schema(form: Any, where: str) -> Json | None:
    fields = Fields(form if isinstance(form, Mapping) else {"type": form}, where)
    if fields.get("type") in (None, "text"):
        return None
    if fields.one_of("type", ("json_object", "json_schema"), "must be text, json_object or json_schema") == "json_object":
        return {"type": "object"}
    if not isinstance(fields.get("schema"), Mapping):
        raise _refused(form, where, "must have a schema, which is an object", "invalid_type")
    schema: Json = fields.get("schema")
    return schema


def _refused(value: object, place: str, problem: str, code: str = "unsupported_value") -> ApiError:
    shown = json.dumps(value, default=repr)
    return ApiError(400, f"{place} = {shown if len(shown) <= 80 else f'{shown[:77]}...'}: {problem}", place, code)


def described(function: Fields, schema: str = "parameters") -> dict[str, Any]:
    """A function in the form of Chat Completions; its schema may have another name."""
    parts = {"name": function.text("name"), "description": function.get("description"), "parameters": function.get(schema)}
    return {"type": "function", "function": {name: value for name, value in parts.items() if value is not None}}
