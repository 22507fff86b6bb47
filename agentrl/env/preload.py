"""What all episodes of a process share is loaded before the first of them."""

from __future__ import annotations

from agentrl.core.errors import EnvLoadError
from agentrl.env.agent import AgentClass
from agentrl.env.load import AgentSpec


def preload(agent: AgentSpec) -> AgentClass:
    """Load the user's class, and have it load what its episodes share.

    Raises:
        EnvLoadError: If that fails.
    """
    cls = agent.load()
    if callable(load := getattr(cls, "preload", None)):
        try:
            load()
        except Exception as error:
            problem = f"{cls.__name__}.preload raised {type(error).__name__}: {error}"
            raise EnvLoadError("--agent", agent.spec, problem, "Correct it.") from error
    return cls
