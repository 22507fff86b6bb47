"""A task set of verifiers 0.4: sums with a tool; a reward that fails, and an agent that runs commands, where its settings say so."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    """Sums."""

    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumData(vf.TaskData):
    """A sum and its result."""

    answer: str
    is_broken: bool = False


class SumTask(vf.Task[SumData]):
    """Right or wrong."""

    @classmethod
    def toolsets(cls, config):
        """The one tool."""
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        """Pay for the result."""
        if self.data.is_broken:
            raise ValueError("no disk\nis left")
        return float(self.data.answer in (trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    """Settings of the task set."""

    last: int = 3
    is_broken: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Sums of small numbers."""

    def load(self):
        """The tasks."""
        for number in range(self.config.last):
            data = SumData(idx=number, prompt=f"1+{number}?", answer=str(1 + number), is_broken=self.config.is_broken)
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
