"""The pages on playing, replaying and inspecting name flags and commands that exist."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.inspect import InspectArgs
from agentrl.cli.main import COMMANDS
from agentrl.cli.replay import ReplayArgs
from agentrl.config.evaluate import PlayConfig, PlayOptions
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.inspect.play_terminal import COMMANDS as TYPED

DOCS = Path(__file__).parents[3] / "docs"


def flags(args: type[Any]) -> set[str]:
    return {f"--{name.replace('_', '-')}" for field in dataclasses.fields(args) for name in (field.name, f"no_{field.name}")}


@pytest.mark.parametrize(("page", "args"), [("play", PlayOptions), ("replay", ReplayArgs), ("inspect", InspectArgs)])
def test_flags_exist(page: str, args: type[Any]) -> None:
    text = (DOCS / f"{page}.md").read_text()
    known = (
        flags(args)
        | {f"--{name.replace('_', '-')}" for name in settings_of(PlayConfig)}
        | {f"--{name.replace('_', '-')}" for name in settings_of(TrainConfig.schema({}))}
    )
    assert set(re.findall(r"--[a-z][a-z-]*", text)) <= known
    assert set(re.findall(r"agentrl ([a-z]+) ", text)) <= set(COMMANDS)
    own = {field.name for field in dataclasses.fields(args)} - {"run", "debug", "trust_remote_code", "data", "rollout", "engine"}
    undocumented = {
        name for name in own if f"--{name.replace('_', '-')}" not in text and name not in ("episodes", "episode", "agent", "pause", "seed")
    }
    assert not undocumented


def test_commands_to_type_exist() -> None:
    text = (DOCS / "play.md").read_text()
    assert set(re.findall(r"`/([a-z]+)", text)) == set(TYPED)
