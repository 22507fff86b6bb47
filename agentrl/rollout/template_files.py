"""Files of templates that a user names, and variables of chat templates: read, and refused where they cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from string import Formatter
from typing import Any

from agentrl.core.errors import ConfigError

TEMPLATE_FLAG = "--teacher-template"


def read_template(file: str) -> str:
    """Return the text of the file that ``--chat-template`` names.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--chat-template", file, f"cannot be read: {error}", "Give the path of a Jinja template.") from error


def template_variables(text: str) -> dict[str, Any]:
    """Return the object that ``--chat-template-kwargs`` gives.

    Raises:
        ConfigError: If the text is no JSON object.
    """
    remedy = 'Write, for example, {"reasoning_effort": "low"}.'
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError("--chat-template-kwargs", text, f"is not JSON: {error}", remedy) from error
    if not isinstance(value, dict):
        raise ConfigError("--chat-template-kwargs", text, "must be a JSON object", remedy)
    return value


def check_hint_template(file: str) -> str:
    """Return the text of a template of ``--teacher self``: ``{prompt}``, ``{label}`` and ``{KEY}`` of a task's metadata are its places.

    Raises:
        ConfigError: If it cannot be read, has places of another form, or none for the prompt.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except (OSError, ValueError) as error:
        raise ConfigError(TEMPLATE_FLAG, file, f"cannot be read: {error}", "Give a text file; write braces twice.") from error
    if "prompt" not in names or not all(name.isidentifier() for name in names):
        problem = f"has the places {', '.join(names) or 'none'}, and needs {{prompt}} and may have {{label}} and {{KEY}} of the metadata"
        raise ConfigError(TEMPLATE_FLAG, file, problem, "Write braces that are no places twice.")
    return text
