"""Checks of black-box agents: requests, branches, and what goes wrong."""

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.check.black_box import ScriptedModel, call_of, call_text, value_of
from agentrl.check.play import TextPolicy
from agentrl.check.report import print_report
from agentrl.core.types import Task
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.answers import AnswerParser, JsonAnswerParser, Parts, Settled
from tests.unit.check.support import BROKEN, checked, ids
from tests.unit.rollout.endpoint.support import ADD, TASK
from tests.unit.rollout.templates import tokenizer

AGENTS = {
    "ParsesAnything": "run-raises",
    "RewardIsText": "reward-type",
    "NeverAsks": "no-request",
    "WantsTwoAnswers": "request-refused",
    "AsksForever": "asks-forever",
    "RunNeverReturns": "timeout",
}


def spec(name: str) -> str:
    return f"{BROKEN / 'bad_agents.py'}:{name}"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name == "AsksForever" else []) for name in AGENTS])
def test_exactly_this_is_found(name: str) -> None:
    report = checked(spec(name), episodes=1, timeout_s=0.4 if name == "RunNeverReturns" else 30.0)
    found = ids(report) - ({"request-refused"} if name == "AsksForever" else set())  # the limit is told as a refusal
    assert found == {AGENTS[name]}, [finding.seen for finding in report.findings]
    screen = io.StringIO()
    print_report(report, console=Console(file=screen))
    assert f"Requests: {report.requests['requests']} in {report.requests['episodes']} episodes" in screen.getvalue()


SLOW_TO_BEGIN = """
import asyncio
from agentrl import BlackBoxAgent, Task

class Suite(BlackBoxAgent):
    start_s = {start_s}  # as the suites in other interpreters measure it when they list their tasks

    @classmethod
    def tasks(cls):
        return [Task("2+2?", label="4")]

    async def run(self, task, llm):
        await asyncio.sleep(0.8)
        async with llm.openai() as client:
            answer = await client.chat.completions.create(model=llm.model, messages=[{{"role": "user", "content": task.prompt}}])
        return float(answer.choices[0].message.content == task.label)
"""


@pytest.mark.parametrize(("start_s", "found"), [(0.0, {"timeout"}), (20.0, set())])
def test_the_imports_of_a_suite_are_not_the_time_of_the_users_code(start_s: float, found: set[str], tmp_path: Path) -> None:
    file = tmp_path / "suite.py"
    file.write_text(SLOW_TO_BEGIN.format(start_s=start_s))
    report = checked(str(file), episodes=1, timeout_s=0.3)
    assert ids(report) & {"timeout"} == found, [finding.seen for finding in report.findings]


def test_requests_and_branches_are_shown() -> None:
    report = checked(spec("Sound"), episodes=2)
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    rows = {row["policy"]: row for row in report.policies}
    assert rows["tools, then label"]["reward"] == rows["label"]["reward"] == 1.0
    assert rows["empty"]["reward"] == 0.0
    assert (rows["tools, then label"]["turns"], rows["label"]["turns"]) == (3.0, 2.0)
    requests = report.requests
    assert requests["tools"] == ["add"]
    assert requests["branches"] == {"sub-agent": requests["episodes"]}
    assert requests["untrained"] == {}
    first, second, third = requests["first"]
    assert first.startswith("1. user: ")
    assert first.endswith("answered calls add")
    assert second.startswith("2. user, assistant, tool: ")
    assert third.startswith("3. user: opens a branch (sub-agent), ")
    screen = io.StringIO()
    print_report(report, console=Console(file=screen))
    assert "Branches that were opened: sub-agent" in screen.getvalue()
    assert "  1. user: " in screen.getvalue()


@pytest.mark.slow
def test_answers_go_through_the_parser_of_the_settings() -> None:
    report = checked(spec("Sound"), episodes=1, tool_parser="hermes")
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    assert report.requests["first"][0].endswith("answered calls add")


class NamedCalls:
    """A parser that takes calls in the form of a template only: ``<function=NAME>``."""

    marks = None

    def parse(self, sampled: str, tools: Sequence[Any], *, reasons: bool = True) -> Parts:
        found = sampled.removeprefix("<function=").removesuffix(">")
        return Parts(text="", calls=((found, "{}"),)) if sampled == f"<function={found}>" else Parts(text=sampled)

    def settled(self, rest: str, tools: Sequence[Any], *, begins: bool, is_held: bool = False) -> Settled:
        return Settled()

    def structure(self, schema: Any, tools: Sequence[Any]) -> None:
        return None


def test_a_scripted_call_has_the_form_that_the_parser_takes() -> None:
    template = copy.deepcopy(tokenizer("xml_tools"))
    own_form = "content + ('<function=' + m.tool_calls[0].function.name + '>' if m.tool_calls else '') + '<|im_end|>"
    template.chat_template = template.chat_template.replace("content + '<|im_end|>", own_form)
    codec = ChatCodec(template, template_tools=True)
    policy = TextPolicy("tools, then label", lambda given: "three")
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert codec.call_text(calls) == "<function=add>"
    assert ChatCodec(tokenizer("none")).call_text(calls) == ""
    expected: list[tuple[AnswerParser, str]] = [(NamedCalls(), "<function=add>"), (JsonAnswerParser(), call_text(call_of(ADD, TASK)))]
    for parser, text in expected:
        model = ScriptedModel(codec, parser, TASK, policy, seed=0, index=0)
        assert model.call(ADD) == text


def test_a_scripted_answer_keeps_to_the_schema_that_a_request_asks_for() -> None:
    report = checked(spec("WantsForms"), episodes=1)
    assert ids(report) == set(), [finding.seen for finding in report.findings]
    assert {row["reward"] for row in report.policies} == {1.0}
    assert report.requests["untrained"] == {"constrained": 2 * report.requests["episodes"]}
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "size": {"const": 3}}}
    value = value_of({"$ref": "#/$defs/node", "$defs": {"node": node}}, Task("?", label="seven"))
    assert (value["size"], value["next"]["size"]) == (3, 3)
    assert value_of({"anyOf": [{"type": "string"}, {"type": "null"}]}, Task("?", label="seven")) == "seven"


def test_a_scripted_call_has_arguments_of_the_schema() -> None:
    kinds = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"type": "string"}, "d": {"type": "array"}, "e": {"default": 5}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": kinds}}}
    parts = JsonAnswerParser().parse(call_text(call_of(tool, Task("?", label="seven"))), [tool])
    assert parts.calls == (("add", '{"a": 1, "b": "x", "c": "seven", "d": [], "e": 5}'),)
