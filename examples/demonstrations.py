"""Write chats in which an environment's own `solve` plays, to begin from: a model too small to read rules cannot find them by chance.

    python examples/demonstrations.py envs/service_desk.py:ServiceDesk 800 demonstrations.jsonl

Tasks are those of the training, in their order. `agentrl sft --data demonstrations.jsonl` learns to write the turns of the assistant.
"""

import asyncio
import inspect
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from typing import Any, cast

from agentrl import ResetState, StepState, Task

MAX_TURNS = 10
AT_ONCE = 8


async def demonstrate(cls: type[Any], task: Task) -> list[dict[str, Any]]:
    """Play one task, and return its messages; they are empty if it did not earn 1."""
    env = cls()
    try:
        opening = await result_of(env.reset(ResetState(task=task, observation=task.prompt, label=task.label, seed=task.seed or 0)))
        chat = messages(task.prompt if opening is None or opening.observation is None else opening.observation)
        for turn in range(MAX_TURNS):
            state = StepState(task=task, label=task.label, turn=turn, turns_left=MAX_TURNS - turn - 1, action_text="", agent="")
            state["action_text"] = await result_of(env.solve(state))
            chat.append({"role": "assistant", "content": state.action_text})
            result = await result_of(env.step(state))
            if result.terminated:
                return chat if result.reward == 1.0 else []
            chat += messages(result.observation)
        return []
    finally:
        await result_of(env.close())


def messages(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt or an observation as chat messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


async def result_of(value: Any) -> Any:
    """Return what a method returned, at once or as a coroutine."""
    return await value if inspect.isawaitable(value) else value


def environment(name: str) -> type[Any]:
    """Load the class with a `solve` that FILE.py:NAME names."""
    path, _, cls = name.rpartition(":")
    spec = spec_from_file_location("environment", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"write FILE.py:NAME, not {name}")
    module = sys.modules["environment"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("type[Any]", getattr(module, cls))


async def demonstrations(cls: type[Any], tasks: Iterable[Task]) -> list[list[dict[str, Any]]]:
    """Play the tasks, a few at once, and return the chats that earned 1 in the order of the tasks."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def played(task: Task) -> list[dict[str, Any]]:
        async with limit:
            return await demonstrate(cls, task)

    return [chat for chat in await asyncio.gather(*map(played, tasks)) if chat]


def main() -> None:
    """Command line: environment, number of tasks, file to write."""
    name, number, out = sys.argv[1:]
    cls = environment(name)
    chats = asyncio.run(demonstrations(cls, islice(cls.tasks(), int(number))))
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats)
    print(f"{len(chats)} chats of {number} tasks are in {out}")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
