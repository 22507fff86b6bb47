"""Whatever models and environments write, ``play`` and ``inspect`` print nothing that a terminal would obey."""

from __future__ import annotations

import io
import re
import unicodedata
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentrl import Message, ResetResult, StepResult, Task
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import FinishReason, Generation, Sampling, Status, Trajectory, floats, ints
from agentrl.env.agent import StepState
from agentrl.env.results import RawText
from agentrl.inspect.episodes import EpisodeTable, show_episode, show_table
from agentrl.inspect.play_terminal import PlayScreen
from agentrl.rollout.observers import ResetEvent, SampleEvent, StepEvent
from agentrl.track.index import row_of
from agentrl.track.text import Screen, text_difference
from tests.unit.rollout.scenes import CODEC

HOSTILE = (
    "\x1b[2J",
    "\x1b]0;t\x07",
    "\x9b31m",
    "\r",
    "\b",
    "\x7f",
    "\u202e",
    "\u2028",
    "\ud800",
    "[bold]",
    ":smile:",
    "[/]",
    "\n",
    "\t",
    "{0}",
)
TEXT = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=5))).map("".join)
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def screen() -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=True, color_system="standard", width=100)), out


def harmless(out: io.StringIO) -> None:
    shown = STYLE.sub("", out.getvalue())
    assert not {c for c in shown if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def record(text: str) -> dict[str, Any]:
    turn = {
        "prompt_text": text,
        "text": text,
        "prompt_ids": [1],
        "token_ids": [2, 3],
        "logprobs": [-0.1, -7.0],
        "versions": [0, 1],
        "finish_reason": "stop",
        "fresh": False,
        "reward": 0.5,
        "temperature": 1.0,
        "info": {text: 1.0},
    }
    return {
        "trajectory_id": text,
        "episode_id": text,
        "group_id": 0,
        "attempt": 0,
        "version": 0,
        "agent": text,
        "status": text,
        "task": {"id": text, "label": text, "metadata": {text: text}, "epoch": 0, "position": 0},
        "reward": None,
        "score": None,
        "reward_parts": {text: 1.0},
        "metrics": {text: 1.0},
        "error": text,
        "timings": {},
        "turns": [turn],
        "unanswered": turn,
    }


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_inspect_prints_nothing_that_a_terminal_obeys(text: str) -> None:
    shown, out = screen()
    show_episode(shown, [record(text)], lambda ids: [text] * len(ids), logprobs=True)
    row = row_of(record(text))
    shown.table(("episode", "last text"), [(row.name, row.text)])
    show_table(shown, EpisodeTable(seen=1, chosen=1, statuses={row.status: 1}, rows=[row]))
    for line, style in text_difference(text, text + "x"):
        shown.line((line, style))
    harmless(out)


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_play_prints_nothing_that_a_terminal_obeys(text: str) -> None:
    shown, out = screen()
    scene = PlayScreen(shown, CODEC, system_prompt=text, chat=True, model=True, tokens=True, logprobs=True)
    ids = ints(CODEC.encode_text(text + "x"))
    size = len(ids)
    generation = Generation(token_ids=ids, logprobs=floats([-1.0] * size), versions=ints([0] * size), finish_reason=FinishReason.LENGTH)
    request = GenerationRequest(request_id="0-0-0-0", prompt_ids=ids, sampling=Sampling(), session="0-0-0")
    message = Message(role=text, content=[{"type": text, "text": text}], tool_calls=[{"name": text}])
    scene.begin(text)
    scene.on_reset(ResetEvent(Task(text, id=text), 0, ResetResult([message], info={text: 1.0})))
    scene.on_reset(ResetEvent(Task(text, id=text), 0, ResetResult()))
    scene.asked(request)
    scene.on_sample(SampleEvent(request, generation))
    scene.on_step(
        StepEvent(StepState(), StepResult(1.0, RawText(text), info={text: 1.0}, sampling={"stop": (text,)}, reward_parts={text: 1.0}))
    )
    scene.toggle("text")
    ended = Trajectory(trajectory_id="0", episode_id="0", group_id=0, turns=(), status=Status.ENV_ERROR, error=text, agent=text)
    scene.ended([ended])
    harmless(out)
