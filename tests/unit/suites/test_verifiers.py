"""Environments of verifiers as black-box agents: errors are no rewards, and signals stay the run's."""

import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import GroupRequest, Status, Trajectory
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import CODEC, SETTINGS, says

pytestmark = pytest.mark.anyio

FILE = '''
"""An environment with the methods of verifiers 0.1."""
import signal

def row(n):
    return {"prompt": PROMPT, "answer": str(n + 1), "example_id": n, "task": "sums"}


class Rubric:
    def __init__(self, *funcs):
        self.funcs = list(funcs)

    async def score_rollout(self, state, score_sem):
        async with score_sem:
            try:
                reward = await self.funcs[0](state["said"], state["answer"])
            except Exception:
                reward = 0.0
        state["reward"], state["metrics"] = reward, {"right": reward}


class Environment:
    message_type = MESSAGE_TYPE
    eval_dataset = None

    def __init__(self):
        self.dataset = [row(n) for n in range(3)]
        self.rubric = Rubric(self.judge)
        signal.signal(signal.SIGINT, lambda *_: None)

    def get_dataset(self):
        return self.dataset

    def get_eval_dataset(self):
        return self.eval_dataset

    def judge(self, said, answer):
        JUDGE
        return float(answer in said)

    async def rollout(self, row, client, model, sampling_args):
        state = {**row, "error": None, "is_truncated": False}
        try:
            made = await client.chat.completions.create(model=model, messages=row["prompt"]OPTIONS)
            state["said"] = made.choices[0].message.content
        except Exception as error:
            state["error"], state["reward"] = error, 0.0
        return state


def load_environment():
    return Environment()
'''

MESSAGES = '[{"role": "user", "content": f"What is {n}+1?"}]'


def written(folder: Path, *, judge: str = "pass", options: str = "", message_type: str = "chat", prompt: str = MESSAGES) -> str:
    path, file = folder / "sums.py", FILE.replace("PROMPT", prompt)
    path.write_text(file.replace("JUDGE", judge).replace("OPTIONS", options).replace("MESSAGE_TYPE", repr(message_type)))
    return str(path)


async def play(cls: type[Any], *texts: str) -> Trajectory:
    engine, server = ScriptedEngine(answer=says(*texts), max_model_len=4096), EndpointServer()
    await engine.start()
    group_request = GroupRequest(group_id=0, task=next(iter(cls.tasks())), n_samples_per_prompt=1, version=0)
    env = BlackBoxSession(cls, "file.py", SETTINGS.env)
    try:
        (trajectory,) = await BlackBoxEpisode(group_request, 0, engine=engine, codec=CODEC, env=env, settings=SETTINGS, server=server).run()
    finally:
        await server.close()
    return trajectory


async def test_a_file_with_load_environment_is_an_agent(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    cls = load_agent(written(tmp_path)).load()
    tasks = list(cls.tasks())
    assert [(task.id, task.label) for task in tasks] == [("0", "1"), ("1", "2"), ("2", "3")]
    assert tasks[0].prompt == [{"role": "user", "content": "What is 0+1?"}]
    assert signal.getsignal(signal.SIGINT) is before
    trajectory = await play(cls, "It is 1.")
    assert (trajectory.error, trajectory.reward, trajectory.status) == (None, 1.0, Status.FINISHED)
    assert trajectory.metrics["right"] == 1.0
    assert (await play(cls, "No idea.")).reward == 0.0


async def test_a_prompt_that_is_text_is_the_message_of_a_user(tmp_path: Path) -> None:
    cls = load_agent(written(tmp_path, prompt='f"What is {n}+1?"')).load()
    assert next(iter(cls.tasks())).prompt == "What is 0+1?"
    trajectory = await play(cls, "It is 1.")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert "What is 0+1?" in trajectory.turns[0].prompt_text


async def test_an_error_in_the_state_is_a_failure_and_no_reward(tmp_path: Path) -> None:
    trajectory = await play(load_agent(written(tmp_path, options=", logprobs=True")).load(), "1")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "the rollout ended with BadRequestError" in str(trajectory.error)


async def test_a_reward_function_that_raises_is_a_failure_too(tmp_path: Path) -> None:
    trajectory = await play(load_agent(written(tmp_path, judge="raise OSError('no judge')")).load(), "1")
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert "a reward function raised OSError: no judge" in str(trajectory.error)


def test_text_completions_and_missing_packages_are_refused(tmp_path: Path) -> None:
    cls = load_agent(written(tmp_path, message_type="completion")).load()
    with pytest.raises(EnvLoadError, match="its message_type is 'completion'"):
        cls.tasks()


async def test_an_environment_of_the_real_package(tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="needs agentrl[verifiers]")
    path = tmp_path / "real.py"
    path.write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\n\n"
        "def right(completion, answer):\n    return float(answer in completion[-1]['content'])\n\n\n"
        "def load_environment():\n"
        "    rows = [{'question': f'What is {n}+1?', 'answer': str(n + 1)} for n in range(3)]\n"
        "    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), system_prompt='Be brief.')\n"
    )
    cls = load_agent(str(path)).load()
    trajectory = await play(cls, "It is 1.")
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert trajectory.metrics["right"] == 1.0
    assert "Be brief." in trajectory.turns[0].prompt_text
