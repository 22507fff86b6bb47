"""Real clients of the endpoint: how each is run, what the model says to it, and which branches it opens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.harness import HARNESSES

ROOT = Path(__file__).parents[2]
PINNED = ROOT / "requirements" / "clients.txt"
FORMS = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def fields(**values: str) -> str:
    """An answer as DSPy asks for it."""
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()), "[[ ## completed ## ]]"])


ADDS, SAYS = call("add", '{"a": 1, "b": 2}'), "three"
FINAL = call("final_answer", '{"answer": "three"}')
ENDS = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt"}')


@dataclass(frozen=True)
class Client:
    """One way to use a client; `program` is a file in `programs`, `mode` its first argument."""

    name: str  # in the docs
    package: str  # whose version the docs name
    program: str
    mode: str
    form: str  # of the API
    answers: tuple[str, ...]  # of the model, in the order of the requests
    branches: tuple[str, ...] = ()  # reasons of those that are opened beside the first
    why: str = ""  # for people: why it opens them, or what it needs

    @property
    def id(self) -> str:
        return f"{self.program}-{self.mode}"

    @property
    def version(self) -> str:
        if self.package == "pi":
            return HARNESSES["pi"].version
        return dict(re.findall(r"^([\w.-]+)==(\S+)", PINNED.read_text(), re.MULTILINE))[self.package]

    @property
    def row(self) -> str:
        """The client's line of the table in docs/black_box.md."""
        opened = ", ".join(f"`{reason.replace(' ', '_')}`" for reason in self.branches) or "none"
        why = self.why or "goes on with its conversation"
        return f"| {self.name} | {self.version} | {FORMS[self.form]} | {len(self.answers)} | {opened} | {why} |"


OWN_TEXT = "writes the call of a tool into its history as its own text; forces calls, so it needs `--forced-forms free`"
CLIENTS = (
    *(Client("OpenAI Agents SDK", "openai-agents", "openai_agents", form, form, (ADDS, SAYS)) for form in ("chat", "responses")),
    *(Client("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent", form, form, (ADDS, SAYS)) for form in FORMS),
    *(
        Client(f"LangGraph, {package}", package, "langgraph_agent", form, form, (ADDS, SAYS))
        for form, package in (("chat", "langchain-openai"), ("responses", "langchain-openai"), ("messages", "langchain-anthropic"))
    ),
    *(Client("LiteLLM, streamed", "litellm", "litellm_loop", form, form, (ADDS, SAYS)) for form in ("chat", "messages")),
    Client("smolagents, tools", "smolagents", "smolagents_agent", "tools", "chat", (ADDS, FINAL), ("edited",), OWN_TEXT),
    Client(
        "smolagents, code",
        "smolagents",
        "smolagents_agent",
        "code",
        "chat",
        ("<code>\nprint(add(1, 2))\n</code>", '<code>\nfinal_answer("three")\n</code>'),
        ("edited",),
        "writes the call of its interpreter into its history behind the answer",
    ),
    Client(
        "smolagents, planning",
        "smolagents",
        "smolagents_agent",
        "planning",
        "chat",
        ("1. Add.", ADDS, "1. Answer.", FINAL),
        ("sub-agent", "system changed", "edited"),
        "plans in conversations of their own, and as above",
    ),
    Client(
        "DSPy ReAct",
        "dspy",
        "dspy_react",
        "chat",
        "chat",
        (
            fields(next_thought="Add.", next_tool_name="add", next_tool_args='{"a": 1, "b": 2}'),
            fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
            fields(reasoning="The sum.", answer="three"),
        ),
        ("sub-agent", "sub-agent"),
        "each step is a prompt of its own, with the steps before as text",
    ),
    Client(
        "mini-swe-agent", "mini-swe-agent", "mini_swe_agent", "chat", "chat", (call("bash", '{"command": "echo three > answer.txt"}'), ENDS)
    ),
    *(Client(f"Inspect, {way}/", "inspect_ai", "inspect_eval", way, "chat", (ADDS, SAYS)) for way in ("vllm", "openai-api")),
    *(Client("pi (Node)", "pi", "pi_agent", form, form, (call("bash", '{"command": "echo three"}'), SAYS)) for form in FORMS),
)
