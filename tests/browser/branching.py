"""A black-box agent that rewrites its history, so that its episodes have branches, one of which a client did not wait for."""

from collections.abc import Iterable
from typing import Any

from agentrl import BlackBoxAgent, ModelEndpoint, StepResult, Task


class Branching(BlackBoxAgent):
    """Asks, goes on, goes back to the first answer, and asks a helper."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        return [Task(f"What is {a}+{b}?", label=str(a + b), id=f"{a}+{b}") for a in range(8) for b in range(8)]

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        first: list[Any] = [{"role": "user", "content": task.prompt}]
        async with llm.openai() as client:

            async def ask(messages: list[Any]) -> str:
                return (await client.chat.completions.create(model=llm.model, messages=messages)).choices[0].message.content or ""

            begun = [*first, {"role": "assistant", "content": await ask(first)}]
            sure = await ask([*begun, {"role": "user", "content": "Are you sure?"}])
            again = await ask([*begun, {"role": "user", "content": "Write only the number."}])
            await ask([{"role": "user", "content": f"Was {again} right?"}])
        right = sum(task.label in answer for answer in (sure, again))
        return StepResult(right / 2, info={"right": float(right)})
