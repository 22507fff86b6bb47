"""An environment with two servers of the Model Context Protocol: the reference server of npm, and one in Python."""

import os
import sys
from pathlib import Path

from agentrl import McpServer, SandboxSpec, Task, ToolEnv

ROOT = Path(__file__).parents[2]
PACKAGES = Path(os.environ.get("AGENTRL_CLIENTS", ROOT / ".venv-clients")).absolute() / "node_modules"
EVERYTHING = PACKAGES / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
PYTHON = ROOT / "tests" / "unit" / "env" / "tools" / "mcp_server.py"


class Sums(ToolEnv):
    """Sums by either server; one session with that of npm serves all episodes."""

    tool_prompt = ""
    mcp = (
        McpServer(
            command=("node", str(EVERYTHING), "stdio"),
            tools=("get-sum", "echo"),
            shared=True,
            sandbox=SandboxSpec(memory_mib=1024, read=(str(PACKAGES),)),
        ),
        McpServer(command=(sys.executable, str(PYTHON)), tools=("add",)),
    )

    @classmethod
    def tasks(cls):
        """Sums of small numbers."""
        return [Task(f"{a}+{b}?", label=str(a + b)) for a in range(3) for b in range(3)]

    def judge(self, state):
        """Pay for the sum, and a little for a text of its length, so that random answers differ."""
        return float(state.action_text.strip() == state.label) + 0.01 * min(len(state.action_text), 9)
