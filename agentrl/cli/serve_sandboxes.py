"""``agentrl serve-sandboxes``: sandboxes of this machine over HTTP, for ``--sandbox remote`` of trainers elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.cli.serve import say, until_signal
from agentrl.cli.words import command_of, read
from agentrl.config.serving import SandboxServing


@dataclass(frozen=True, kw_only=True)
class ServeSandboxesArgs(SandboxServing):
    """Hold sandboxes for trainers elsewhere, which take --sandbox remote, --sandbox-url and the key in AGENTRL_SANDBOX_KEY."""


SERVE_SANDBOXES = command_of("serve-sandboxes", ServeSandboxesArgs)


def main(words: list[str]) -> int:
    """Serve until a signal comes; the exit code is 0 then."""
    args: ServeSandboxesArgs = read(SERVE_SANDBOXES, words)
    from agentrl.api.sandbox_serving import serve_sandboxes

    return until_signal(serve_sandboxes(args, say))
