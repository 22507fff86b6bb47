"""Agent programs that train as they are: how each starts without a terminal, learns its model's address, and keeps its prompts short.

One entry of `HARNESSES` is all that agentrl knows about a program. Versions are pinned here and nowhere else: these are the ones that
``make test-clients`` installs and that docs/harnesses.md was measured with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

DIALECTS = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}
"""Names of the APIs that programs speak."""
BRIEF = "You are a coding agent. Work with the tools until the task is done."
"""System prompt in place of a program's own, where short prompts are wanted."""

Calls: TypeAlias = tuple[tuple[str, Mapping[str, Any]], ...]
"""Calls of tools by name and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Words, environment variables and files with which a program starts.

    In each of them these stand for values of the episode: ``{prompt}``, ``{task_id}``, ``{folder}`` (the working folder), ``{home}``,
    ``{model}`` and ``{named}`` (the model's name as the program wants it), ``{base_url}`` (of OpenAI's APIs), ``{anthropic_base_url}``,
    ``{address}`` (that of the dialect), ``{api}`` (the program's own name for the dialect), ``{api_key}``, ``{context}`` (tokens that a
    conversation may have) and ``{answer}`` (tokens that the program should leave for one answer).

    Attributes:
        words: Arguments.
        variables: Environment variables.
        files: Content of files by their paths below the home of the episode.
    """

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The session that a scripted model plays to find out how a program behaves.

    In texts and arguments ``{file}`` and ``{other}`` stand for two files, ``{folder}`` for theirs, ``{old}`` and ``{new}`` for lines.

    Attributes:
        read: Calls that read the two files side by side; none if the program shows no files to its model by itself.
        edit: Calls of an edit, or the text of one.
        end: Calls or text of the last answer.
        together: True if one answer holds all edits, because the program works on one answer only.
    """

    read: Calls = ()
    edit: Calls | str
    end: Calls | str = "All done."
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """An agent program, as ``--agent harness:NAME`` starts it.

    Attributes:
        title: Name for people.
        program: Name of its executable.
        package: Package that has it.
        version: Version of the package that was tried.
        installer: Program that installs it.
        dialects: APIs that it speaks, by what it calls them; the first is the default.
        start: How it starts, without a terminal and without questions.
        task: Its last arguments, which tell it the task.
        brief: What is added for a short first request: another system prompt, and few tools.
        script: A session for ``agentrl check harness:NAME``.
        named: Name of the model as the program wants it.
        writes: Files that it leaves in its home or, if they begin with ``./``, in the working folder.
        memory_mib: Memory that it needs at least.
        processes: Processes and threads that it needs at least.
    """

    title: str
    program: str
    package: str
    version: str
    installer: Literal["npm", "pip"] = "npm"
    dialects: Mapping[str, str]
    start: Setup
    brief: Setup
    script: Script
    task: tuple[str, ...] = ("--", "{prompt}")
    named: str = "{model}"
    writes: tuple[str, ...] = ()
    memory_mib: int = 2048
    processes: int = 256

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"npm install -g {self.package}@{self.version}" if self.installer == "npm" else f"pip install {self.package}=={self.version}"


def _shell(tool: str, argument: str, end: Calls | str = "All done.") -> Script:
    """The script of a program that works with a shell."""
    return Script(
        read=tuple((tool, {argument: f"cat {{{name}}}"}) for name in ("file", "other")),
        edit=((tool, {argument: "cd {folder} && sed -i 's/^{old}$/{new}/' {file}"}),),
        end=end,
    )


CLAUDE_CODE = Harness(
    title="Claude Code",
    program="claude",
    package="@anthropic-ai/claude-code",
    version="2.1.197",
    dialects={"messages": "messages"},
    start=Setup(
        words=("-p", "--model", "{named}", "--dangerously-skip-permissions"),
        variables={
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
        },
    ),
    brief=Setup(words=("--system-prompt", BRIEF, "--tools", "Bash"), variables={"CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1"}),
    script=Script(
        read=(("Read", {"file_path": "{file}", "limit": 1000.0}), ("Read", {"file_path": "{other}"})),
        edit=(("Edit", {"file_path": "{file}", "old_string": "{old}\n", "new_string": "{new}   \n"}),),
    ),
    writes=(".claude/", ".claude.json"),
)
CODEX = Harness(
    title="Codex",
    program="codex",
    package="@openai/codex",
    version="0.169.0",
    dialects={"responses": "responses"},
    start=Setup(
        words=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        files={
            ".codex/config.toml": """\
model = "{named}"
model_provider = "agentrl"
model_context_window = {context}
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.agentrl]
name = "agentrl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
        },
    ),
    brief=Setup(
        words=tuple(
            word
            for setting in (
                "model_instructions_file={home}/.codex/brief.md",
                "include_permissions_instructions=false",
                "include_environment_context=false",
                "web_search=disabled",
                "tools.view_image=false",
                "features.goals=false",
                "features.multi_agent=false",
                "skills.bundled.enabled=false",
            )
            for word in ("-c", setting)
        ),
        files={".codex/brief.md": BRIEF},
    ),
    script=_shell("exec_command", "cmd"),
    writes=(".codex/",),
)
OPENCODE = Harness(
    title="opencode",
    program="opencode",
    package="opencode-ai",
    version="1.18.33",
    dialects={"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"},
    named="agentrl/{model}",
    start=Setup(
        words=("run", "--model", "{named}"),
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={
            ".config/opencode/opencode.json": """\
{
  "autoupdate": false,
  "snapshot": false,
  "share": "disabled",
  "permission": {"*": "allow"},
  "provider": {
    "agentrl": {
      "npm": "{api}",
      "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
      "models": {"{model}": {"name": "{model}", "tool_call": true, "limit": {"context": {context}, "output": {answer}}}}
    }
  }
}
"""
        },
    ),
    brief=Setup(
        variables={"OPENCODE_CONFIG_CONTENT": json.dumps({"agent": {"build": {"prompt": BRIEF, "tools": {"*": False, "bash": True}}}})}
    ),
    script=Script(
        read=(("read", {"filePath": "{file}"}), ("read", {"filePath": "{other}"})),
        edit=(("edit", {"filePath": "{file}", "oldString": "{old}\n", "newString": "{new}   \n"}),),
    ),
    writes=(".config/opencode/", ".local/share/opencode/", ".cache/opencode/"),
)
PI = Harness(
    title="pi",
    program="pi",
    package="@earendil-works/pi-coding-agent",
    version="0.74.2",
    dialects={"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"},
    start=Setup(
        words=("-p", "--provider", "agentrl", "--model", "{named}"),
        variables={"PI_CODING_AGENT_DIR": "{home}/.pi/agent", "PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={
            ".pi/agent/models.json": """\
{
  "providers": {
    "agentrl": {
      "baseUrl": "{address}",
      "api": "{api}",
      "apiKey": "OPENAI_API_KEY",
      "models": [{"id": "{model}", "reasoning": false, "input": ["text"], "contextWindow": {context}, "maxTokens": {answer}}]
    }
  }
}
"""
        },
    ),
    brief=Setup(words=("--system-prompt", BRIEF, "--tools", "bash")),
    task=("{prompt}",),
    script=Script(
        read=(("read", {"path": "{file}"}), ("read", {"path": "{other}"})),
        edit=(("edit", {"path": "{file}", "edits": [{"oldText": "{old}\n", "newText": "{new}   \n"}]}),),
    ),
    writes=(".pi/agent/",),
)
QWEN_CODE = Harness(
    title="Qwen Code",
    program="qwen",
    package="@qwen-code/qwen-code",
    version="0.24.4",
    dialects={"chat": "openai"},
    start=Setup(
        words=("--auth-type", "{api}", "--model", "{named}", "--approval-mode", "yolo"),
        files={
            ".qwen/settings.json": json.dumps(
                {
                    "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
                    "privacy": {"usageStatisticsEnabled": False},
                    "telemetry": {"enabled": False},
                }
            )
        },
    ),
    brief=Setup(words=("--bare", "--system-prompt", BRIEF, "--core-tools", "run_shell_command")),
    task=("--prompt={prompt}",),
    script=Script(
        read=(("read_file", {"file_path": "{file}"}), ("read_file", {"file_path": "{other}"})),
        edit=(("edit", {"file_path": "{file}", "old_string": "{old}\n", "new_string": "{new}   \n"}),),
    ),
    writes=(".qwen/",),
)
AIDER = Harness(
    title="aider",
    program="aider",
    package="aider-chat",
    version="0.86.2",
    installer="pip",
    dialects={"chat": "openai", "messages": "anthropic"},
    named="{api}/{model}",
    start=Setup(
        words=(
            *("--model", "{named}", "--edit-format", "diff", "--yes-always", "--no-git", "--no-pretty", "--no-stream", "--no-analytics"),
            *("--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--no-gitignore", "--no-detect-urls"),
        ),
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    brief=Setup(words=("--map-tokens", "0")),
    task=("--message={prompt}",),
    script=Script(
        edit="{file}\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```",
        together=True,
    ),
    writes=(".aider/", "./.aider.chat.history.md", "./.aider.input.history", "./.aider.tags.cache.v4/"),
)
MINI_SWE_AGENT = Harness(
    title="mini-swe-agent",
    program="mini",
    package="mini-swe-agent",
    version="2.4.6",
    installer="pip",
    dialects={"chat": "openai", "messages": "anthropic"},
    named="{api}/{model}",
    start=Setup(
        words=("--model", "{named}", "--yolo", "--exit-immediately", "--output", "{home}/trajectory.json"),
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    brief=Setup(),
    task=("--task={prompt}",),
    script=_shell("bash", "command", (("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),)),
    writes=("trajectory.json", ".config/mini-swe-agent/"),
)

HARNESSES: Mapping[str, Harness] = {
    "claude-code": CLAUDE_CODE,
    "codex": CODEX,
    "opencode": OPENCODE,
    "pi": PI,
    "qwen-code": QWEN_CODE,
    "aider": AIDER,
    "mini-swe-agent": MINI_SWE_AGENT,
}
"""The programs by the names that follow ``harness:``."""
