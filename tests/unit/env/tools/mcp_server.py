"""A server of the Model Context Protocol, for tests: ``python mcp_server.py`` speaks on standard output, ``... PORT`` over HTTP."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="ERROR")
counted = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Count the calls of this tool."""
    global counted
    counted += 1
    return counted


@server.tool()
def refuse(reason: str) -> str:
    """Fail with a reason."""
    raise ToolError(f"no: {reason}")


@server.tool()
def sleep(seconds: float) -> str:
    """Take some time."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def die(code: int) -> str:
    """End the server."""
    sys.stderr.write("the end is near\n")
    sys.stderr.flush()
    os._exit(code)


@server.tool()
def fill(mib: int) -> int:
    """Use up memory."""
    data = [b"x" * 2**20 for _ in range(mib)]
    time.sleep(2)
    return len(data)


@server.tool()
def look(path: str) -> str:
    """Read a file."""
    return Path(path).read_text()


@server.tool()
def variable(name: str) -> str:
    """Read an environment variable."""
    return os.environ.get(name, "(none)")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
