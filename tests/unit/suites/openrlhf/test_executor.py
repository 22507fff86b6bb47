"""OpenRLHF's executors with an `execute` of their own: they run unchanged, and nothing is trained that was not sampled."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections import changed
from agentrl.core.errors import EngineDeadError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import GroupRequest, Status, Task, Trajectory
from agentrl.learner.batch import merge_turns
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, PATIENT, Scene, says
from tests.unit.rollout.test_episode import dialogue

pytestmark = pytest.mark.anyio

FILE = Path(__file__).parents[3] / "openrlhf_files" / "executor.py"
HEAD = """
from copy import deepcopy
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine{images}):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        async def sample(ids, **changes):
            params = deepcopy(sampling_params)
            for name, value in changes.items():
                setattr(params, name, value)
            return (await llm_engine.generate(ids, params)).outputs[0]
        def answer(ids, ranges, **more):
            return {{"observation_tokens": ids, "action_ranges": ranges, "reward": 1.0, "rollout_log_probs": None, **more}}
"""


def scene_of(spec: Path, answer: Any, version: int = 0) -> Scene:
    group_request = GroupRequest(group_id=3, task=Task("What is 1+2?", label="3", id="sum"), n_samples_per_prompt=1, version=0)
    engine = ScriptedEngine(answer=answer, version=version)
    settings = changed(PATIENT, max_new_tokens=8)
    return Scene(load_agent(str(spec)).load(), engine, settings, group_request)


async def run(folder: Path, body: str, images: str = ", images=None") -> tuple[Scene, Trajectory]:
    path = folder / "agent.py"
    path.write_text(HEAD.format(images=images) + "".join(f"        {line}\n" for line in body.strip().splitlines()))
    scene = scene_of(path, three)
    return scene, await scene.play()


async def test_a_greedy_evaluation_plays_it_too() -> None:
    scene = scene_of(FILE, says("It is 4", "3"))
    scene.settings = changed(scene.settings, temperature=0.0, max_new_tokens=8)
    assert (await scene.play()).error is None
    assert [request.sampling.temperature for request in scene.engine.requests] == [0.0, 0.0]


def three(request: GenerationRequest) -> Sequence[int]:
    """Different tokens for every call."""
    number = int(request.request_id.rsplit("-", 1)[1])
    return [20 + 10 * number + place for place in range(3)]


async def test_a_file_with_its_own_execute_runs_unchanged() -> None:
    scene = scene_of(FILE, says("It is 4", "3"), version=6)
    trajectory = await scene.play()
    assert (trajectory.error, trajectory.status, trajectory.reward, trajectory.score) == (None, Status.FINISHED, 1.0, 1.0)
    assert trajectory.metrics == {"tries": 2.0}
    first, second = scene.engine.requests
    assert CODEC.decode(first.prompt_ids) == dialogue(("user", "What is 1+2?"))  # type: ignore[arg-type]
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (8, 4)
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*second.prompt_ids, *trajectory.turns[1].token_ids]
    logprobs = [float(p) for turn in row.turns for p in turn.logprobs]
    assert logprobs == [-(token % 7 + 1) / 8 for turn in trajectory.turns for token in turn.token_ids]
    assert {int(v) for turn in row.turns for v in turn.versions} == {6}
    assert CODEC.decode(trajectory.turns[1].prompt_ids) == "<|user|>Again.<|end|><|assistant|>"


async def test_a_cut_answer_is_truncated() -> None:
    trajectory = await scene_of(FILE, lambda request: range(30, 60)).play()
    assert (trajectory.status, trajectory.reward) == (Status.TRUNCATED, 0.0)


async def test_two_completions_may_share_a_range_and_unused_ones_are_not_trained(tmp_path: Path) -> None:
    body = """
wasted = await sample(tokens)
one = await sample(tokens, temperature=0.5)
two = await sample(tokens + one.token_ids)
ids = tokens + one.token_ids + two.token_ids
return answer(ids, [(len(tokens), len(ids))])
"""
    _, trajectory = await run(tmp_path, body, images="")
    assert trajectory.error is None
    assert [turn.token_ids.tolist() for turn in trajectory.turns] == [[30, 31, 32], [40, 41, 42]]
    assert [turn.temperature for turn in trajectory.turns] == [0.5, 1.0]


async def test_the_engine_looks_like_vllms(tmp_path: Path) -> None:
    body = """
output = await llm_engine.generate(tokens, sampling_params, multi_modal_data=None)
done = output.outputs[0]
assert output.prompt_token_ids == tokens and output.finished
assert done.token_ids == [20, 21, 22] and done.index == 0 and done.finish_reason == "stop"
assert [entry[token].logprob for token, entry in zip(done.token_ids, done.logprobs)] == [-7 / 8, -1 / 8, -2 / 8]
assert llm_engine.get_weight_version() == 0 and not llm_engine.partial_rollout
assert sampling_params.logprobs is not None and sampling_params.n == 1
return answer(tokens + done.token_ids, [(len(tokens), len(tokens) + 3)], scores=0.5, extra_logs={"a": 1})
"""
    _, trajectory = await run(tmp_path, body)
    assert (trajectory.error, trajectory.score, trajectory.metrics) == (None, 0.5, {"a": 1.0})


GOOD = "done = await sample(tokens)\nids, start = tokens + done.token_ids, len(tokens)\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GOOD + "return answer(tokens + [99] + done.token_ids[1:], [(start, start + 3)])", "(99, 21, 22) are not what llm_engine.generate"),
        (GOOD + "return answer(ids + [2], [(start, start + 4)])", "action_ranges[0]: tokens"),
        (GOOD + "return answer([7] + ids, [(start + 1, start + 4)])", "were sampled, but after other tokens than those before them"),
        (GOOD + "return answer(ids, [(start, start + 3), (start, start + 3)])", "action_ranges[1]: tokens"),
        (GOOD + "return answer(ids, [(start, start + 9)])", "action_ranges[0] = "),
        (GOOD + "return answer(ids, [(start,)])", "must be (start, end) within"),
        (GOOD + "return answer(ids, None)", "AgentExecutor.execute returned action_ranges = None: must be a list"),
        (GOOD + "return answer(ids, [(start, start + 3)], reward=None)", "OpenRLHF would have a reward model score it"),
        (GOOD + "return answer(ids, [(start, start + 3)], reward=float('nan'))", "returned reward = nan: must be finite"),
        (GOOD + "return {'reward': 1.0}", "the key 'observation_tokens' is missing"),
        (GOOD + "return None", "agent.py: AgentExecutor.execute returned result = None: return a dictionary"),
        ("await sample(tokens, temperature=-1.0)", "returned sampling['temperature'] = -1.0"),
        ("await sample(tokens, n=2)", "sampling_params.n = 2: call it once for each continuation"),
        ("raise OSError('no server')", "AgentExecutor.execute raised OSError: no server"),
    ],
)
async def test_what_does_not_match_is_an_error_that_says_so(tmp_path: Path, body: str, message: str) -> None:
    _, trajectory = await run(tmp_path, body)
    assert (trajectory.status, trajectory.reward, trajectory.trainable) == (Status.ENV_ERROR, None, False)
    assert message in str(trajectory.error)


async def test_one_executor_serves_all_episodes_of_a_process(tmp_path: Path) -> None:
    body = (
        "self.count = getattr(self, 'count', 0) + 1\n" + GOOD + "return answer(ids, [(start, start + 3)], extra_logs={'count': self.count})"
    )
    scene, first = await run(tmp_path, body)
    assert first.metrics == {"count": 1.0}
    assert (await scene.play(1)).metrics == {"count": 2.0}


SERVER = Path(__file__).parents[3] / "openrlhf_files" / "openai_server.py"


def server_scene(folder: Path, answer: Any, *change: str) -> Scene:
    """A scene with a copy of the file, whose executor no other test has used."""
    path = folder / "agent.py"
    path.write_text(SERVER.read_text().replace(*change) if change else SERVER.read_text())
    return scene_of(path, answer)


def differently(request: GenerationRequest) -> Sequence[int]:
    """An answer that depends on the whole request, so that no two conversations are the same."""
    number = sum(map(ord, request.request_id)) * 31 + len(request.prompt_ids)
    text = f"3, not {number}" if "Again." in CODEC.decode(request.prompt_ids.tolist()) else f"It is {number}"
    return CODEC.encode_text(f"{text}<|im_end|>")


async def test_an_executor_with_a_server_of_its_own_may_keep_the_engine_of_its_first_episode(tmp_path: Path) -> None:
    scene = server_scene(tmp_path, says("It is 4", "3"))
    for index in range(3):
        trajectory = await scene.play(index)
        assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)
        (row,) = merge_turns(trajectory)
        assert row.tokens.tolist() == [*scene.engine.requests[-1].prompt_ids, *trajectory.turns[1].token_ids]
        assert scene.engine.requests[-1].request_id.startswith(trajectory.episode_id)


async def test_its_episodes_may_run_at_once_and_each_trains_what_its_own_result_is_made_of(tmp_path: Path) -> None:
    scene = server_scene(tmp_path, differently)
    scene.settings = changed(scene.settings, max_new_tokens=32)
    scene.engine.delay = lambda request: 0.001 * (len(request.request_id) * 7 % 5)
    await scene.engine.start()
    played = await asyncio.gather(*(scene.episode(index).run() for index in range(8)))
    asked = [(*request.prompt_ids.tolist(),) for request in scene.engine.requests]
    assert [trajectory.error for (trajectory,) in played] == [None] * 8
    assert len(asked) == 16
    for (trajectory,) in played:
        (row,) = merge_turns(trajectory)
        first, second = trajectory.turns
        assert (*first.prompt_ids, *first.token_ids, *second.prompt_ids) in asked
        logprobs = [float(p) for turn in row.turns for p in turn.logprobs]
        assert logprobs == [-(token % 7 + 1) / 8 for turn in (first, second) for token in turn.token_ids]
        assert len({first.number, second.number}) == 2


async def test_an_error_of_the_engine_behind_a_server_stays_one_of_the_engine(tmp_path: Path) -> None:
    scene = server_scene(tmp_path, lambda request: EngineDeadError("gone"))
    trajectory = await scene.play()
    assert (trajectory.status, trajectory.error) == (Status.ENGINE_ERROR, "EngineDeadError: gone")


async def test_without_a_reward_the_error_says_what_to_do(tmp_path: Path) -> None:
    trajectory = await server_scene(tmp_path, says("It is 4", "3"), '{"reward": float(label in second)}', "{}").play()
    assert trajectory.status is Status.ENV_ERROR
    assert "call your reward function or server in it (in `run_agent`, return its reward)" in str(trajectory.error)


async def run_file(folder: Path, text: str, answer: Any = three) -> tuple[Scene, Trajectory]:
    path = folder / "agent.py"
    path.write_text(text)
    scene = scene_of(path, answer)
    return scene, await scene.play()


async def test_the_base_has_no_execute_to_call(tmp_path: Path) -> None:
    _, trajectory = await run_file(
        tmp_path,
        "from openrlhf.utils.agent import AgentExecutorBase\nclass AgentExecutor(AgentExecutorBase):\n"
        "    async def execute(self, *args, **kwargs): return await super().execute(*args, **kwargs)\n",
    )
    assert trajectory.status is Status.ENV_ERROR
    assert "AgentExecutor needs a method async execute" in str(trajectory.error)


TRIES = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Tries(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.count = 0
        self.texts = []

    async def step(self, states, **kwargs):
        self.count += 1
        self.texts.append(states["observation_text"])
        params = states["sampling_params"]
        params.max_tokens, params.temperature = 4, 0.5
        {line}
        return {{
            "rewards": float(states["label"] in states["action_text"]), "scores": -2.0, "sampling_params": params,
            "environment_feedback": "<|user|>Again.<|end|><|assistant|>", "done": self.count == 2,
            "extra_logs": {{"count": self.count, "grew": len(self.texts[-1]) > len(self.texts[0])}},
        }}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Tries)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        outcome = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        outcome["reward"] -= 0.5
        outcome["extra_logs"]["turns"] = len(outcome["action_ranges"])
        assert len(outcome["observation_tokens"]) == len(outcome["rollout_log_probs"])
        return outcome
"""


async def test_an_override_may_use_the_execute_of_the_multi_turn_executor(tmp_path: Path) -> None:
    scene, trajectory = await run_file(tmp_path, TRIES.format(line=""), says("It is 4", "3"))
    assert (trajectory.error, trajectory.reward, trajectory.score) == (None, 0.5, 0.0)
    assert trajectory.metrics == {"count": 1.5, "grew": 0.5, "turns": 2.0}
    first, second = scene.engine.requests
    assert CODEC.decode(first.prompt_ids) == dialogue(("user", "What is 1+2?"))  # type: ignore[arg-type]
    assert [(request.sampling.max_tokens, request.sampling.temperature) for request in (first, second)] == [(8, 1.0), (4, 0.5)]
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*second.prompt_ids, *trajectory.turns[1].token_ids]
    assert CODEC.decode(trajectory.turns[1].prompt_ids) == "<|user|>Again.<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise OSError('no game')", "agent.py: Tries.step raised OSError: no game"),
        ("return {'rewards': float('nan'), 'done': True}", "agent.py: Tries.step returned rewards = nan: must be finite"),
        ("return {'rewards': 1.0, 'done': False, 'environment_feedback': 3}", "environment_feedback = 3: must be text"),
    ],
)
async def test_a_failure_below_it_is_named(tmp_path: Path, line: str, message: str) -> None:
    _, trajectory = await run_file(tmp_path, TRIES.format(line=line))
    assert (trajectory.status, trajectory.reward) == (Status.ENV_ERROR, None)
    assert message in str(trajectory.error)


async def test_a_full_context_ends_it(tmp_path: Path) -> None:
    text = TRIES.format(line="").replace("self.count == 2", "False")
    scene, trajectory = await run_file(tmp_path, text)
    assert trajectory.status is Status.TRUNCATED
    assert len(scene.engine.requests) > 2


SINGLE = """
from openrlhf.utils.agent import SingleTurnAgentExecutor

class AgentExecutor(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__()
        {judge}

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        outcome = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)
        outcome["reward"] = 0.25 if outcome["reward"] is None else outcome["reward"] * 2
        return outcome
"""


@pytest.mark.parametrize(("judge", "reward"), [("self.reward_func = lambda queries, prompts, labels: {'rewards': [3.0]}", 6.0), ("", 0.25)])
async def test_an_override_may_use_the_execute_of_the_single_turn_executor(tmp_path: Path, judge: str, reward: float) -> None:
    _, trajectory = await run_file(tmp_path, SINGLE.format(judge=judge))
    assert (trajectory.error, trajectory.reward) == (None, reward)
