"""A small environment in OpenEnv's API, served by the real package: guess a number.

python -m tests.env_servers.open_env SESSIONS
"""

from __future__ import annotations

import random
import sys
import time
import types
from importlib.util import find_spec
from typing import Any

if find_spec("fastmcp") is None:  # OpenEnv imports it for environments that are tools; it needs an older mcp than vLLM does
    for name in ("fastmcp", "fastmcp.client", "fastmcp.client.client"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fastmcp"].Client = sys.modules["fastmcp.client.client"].CallToolResult = object  # type: ignore[attr-defined]

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from tests.env_servers.serving import serve

OPEN: set[int] = set()
HIGHEST = int(sys.argv[2]) if len(sys.argv) > 2 else 9


class Guess(Action):
    number: int


class Hint(Observation):
    text: str
    guesses: int = 0


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        OPEN.add(id(self))

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = HIGHEST, **kwargs: Any) -> Hint:
        self.number, self.guesses = random.Random(seed).randint(1, high), 0
        return Hint(text=f"A number from 1 to {high}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.guesses += 1
        if action.number == 100:
            raise ValueError("the environment broke")
        if action.number == 101:
            time.sleep(60)
        if action.number == 102:
            return Hint(text="x" * 2_000_000)
        if action.number == 103:
            return Hint(text="", done=True)
        if action.number == self.number:
            return Hint(text="Right.", guesses=self.guesses, done=True, reward=1.0)
        if self.guesses == 5:
            return Hint(text="Too many.", guesses=5, done=True, reward=0.0, metadata={"truncated": True, "guesses": 5})
        return Hint(text="Higher." if action.number < self.number else "Lower.", guesses=self.guesses)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)

    def close(self) -> None:
        OPEN.discard(id(self))


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=int(sys.argv[1]) if len(sys.argv) > 1 else 1)


@app.get("/_open")
async def count() -> int:
    """For the tests: environments that are not closed."""
    return len(OPEN)


if __name__ == "__main__":
    serve(app)
