"""An agent on OpenAI's SDK that knows nothing of training: it asks for a sum, and once more where the answer is wrong."""

from agentrl import BlackBoxAgent, ModelEndpoint, StepResult, Task


class SecondTry(BlackBoxAgent):
    """Earns 1 for a right first answer and half for a right second one."""

    @classmethod
    def tasks(cls) -> list[Task]:
        """All sums of two digits."""
        return [Task(f"What is {a}+{b}?", label=str(a + b)) for a in range(10) for b in range(10)]

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """One episode."""
        messages = [{"role": "user", "content": str(task.prompt)}]
        async with llm.openai() as client:
            for tries in (1, 2):
                answer = await client.chat.completions.create(model=llm.model, messages=messages)
                text = answer.choices[0].message.content or ""
                if text.strip() == task.label:
                    return StepResult(1.0 / tries, terminated=True, score=1.0)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Wrong. Try again."}]
        return StepResult(0.0, terminated=True, score=0.0)
