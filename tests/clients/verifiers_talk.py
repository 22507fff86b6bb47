"""A task set of verifiers 0.4 with a user in a script, who says a number in each turn; the last answer is the sum."""

import verifiers.v1 as vf


class TalkData(vf.TaskData):
    """Numbers that the user says after the first one."""

    answer: str
    more: list[int]


class TalkTask(vf.Task[TalkData]):
    """Right or wrong."""

    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        """Pay for the sum."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class TalkEnv(vf.SingleAgentEnv):
    """One number after another."""

    async def run(self, task, agents):
        """Say the next number after every answer."""
        async with agents.agent.interaction(task) as interaction:
            said = await interaction.turn()
            for number in task.data.more:
                if said.terminated:
                    break
                said = await interaction.turn([vf.UserMessage(content=f"+{number}")])


class Talk(vf.Taskset[TalkTask, vf.TasksetConfig]):
    """Sums of three numbers."""

    def load(self):
        """The tasks."""
        for number in range(3):
            yield TalkTask(TalkData(idx=number, prompt=f"{number}", answer=str(number + 5), more=[2, 3]), self.config.task)


__all__ = ["Talk", "TalkEnv"]
