"""Executors: what was sampled is what is trained, whatever user code does with its calls."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl import Executor, Policy, StepResult, Task
from agentrl.config.sections import changed
from agentrl.core.errors import ContextLengthError, EngineError, EnvLoadError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Sampling, Status, Trajectory, derive_seed
from agentrl.learner.batch import merge_turns
from agentrl.rollout.recorder import Context, Recorder
from agentrl.suites.load import load_agent
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, PATIENT, TASK, Scene, says
from tests.unit.rollout.test_episode import dialogue, text_of

pytestmark = pytest.mark.anyio

Play = Callable[[Task, Policy], Any]


def executor(play: Play, **methods: Any) -> type[Executor]:
    async def execute(self: Any, task: Task, llm: Policy) -> Any:
        return await play(task, llm)

    return type("Own", (Executor,), {"execute": execute, **methods})


async def played(play: Play, answer: Any = None, methods: dict[str, Any] | None = None, **changes: Any) -> tuple[Scene, Trajectory]:
    engine = ScriptedEngine(answer=answer) if answer else ScriptedEngine()
    scene = Scene(executor(play, **(methods or {})), engine, changed(PATIENT, **changes))
    return scene, await scene.play()


def by_number(request: GenerationRequest) -> Sequence[int]:
    """Different tokens for every call."""
    number = int(request.request_id.rsplit("-", 1)[1])
    return [20 + 10 * number + place for place in range(3)]


async def chat(task: Task, llm: Policy) -> StepResult:
    first = await llm.generate(llm.encode_prompt(task.prompt), {"temperature": 0.5})
    second = await llm.generate(first.ids + llm.encode_next("Again.", first))
    return StepResult(1.0, score=0.5, info={"tries": 2.0}, reward_parts={"answer": 1.0}) if second.text == "three" else StepResult(0.0)


async def test_truncated_sampling_is_refused_where_ratios_are_computed() -> None:
    async def nucleus(task: Task, llm: Policy) -> StepResult:
        await llm.generate(llm.encode_prompt(task.prompt), {"top_p": 0.5})
        return StepResult(1.0)

    scene = Scene(executor(nucleus), settings=replace(PATIENT, is_training=True, weighs_ratios=True))
    trajectory = await scene.play()
    assert trajectory.status is Status.ENV_ERROR
    assert "llm.generate returned sampling['top_p'] = 0.5: truncated sampling biases" in (trajectory.error or "")
    assert scene.engine.requests == []
    assert (await Scene(executor(nucleus)).play()).status is Status.FINISHED


async def test_a_conversation_is_one_row_of_exactly_what_the_engine_saw() -> None:
    scene, trajectory = await played(chat, says("two", "three"))
    first, second = scene.engine.requests
    assert text_of(second.prompt_ids) == dialogue(("user", str(TASK.prompt)), ("assistant", "two"), ("user", "Again."))
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    (row,) = merge_turns(trajectory)
    assert row.tokens.tolist() == [*second.prompt_ids, *trajectory.turns[1].token_ids]
    assert np.array_equal(row.temperatures, [0.5] * len(trajectory.turns[0].token_ids) + [1.0] * len(trajectory.turns[1].token_ids))
    logprobs = [float(p) for turn in row.turns for p in turn.logprobs]
    assert logprobs == [-(token % 7 + 1) / 8 for turn in trajectory.turns for token in turn.token_ids]
    assert (trajectory.status, trajectory.reward, trajectory.score) == (Status.FINISHED, 1.0, 0.5)
    assert (trajectory.metrics, trajectory.reward_parts) == ({"tries": 2.0}, {"answer": 1.0})
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert [request.sampling.seed for request in scene.engine.requests] == [derive_seed(5, "sum", 0, 0, number) for number in (0, 1)]


async def test_a_number_is_the_reward_and_the_score_its_clipped_value() -> None:
    async def play(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        return 3.0

    _, trajectory = await played(play)
    assert (trajectory.reward, trajectory.score, trajectory.trainable) == (3.0, 1.0, True)


async def test_a_rewritten_context_begins_a_new_branch() -> None:
    async def play(task: Task, llm: Policy) -> float:
        first = await llm.generate([5, 6])
        await llm.generate([*first.ids, 7])
        third = await llm.generate([5, 9])
        await llm.generate(third.ids)
        return 1.0

    _, trajectory = await played(play, by_number)
    assert [turn.fresh for turn in trajectory.turns] == [False, False, True, False]
    rows = merge_turns(trajectory)
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 20, 21, 22, 7, 30, 31, 32], [5, 9, 40, 41, 42, 50, 51, 52]]
    assert [[turn.reward for turn in row.turns] for row in rows] == [[0.0, 0.0], [0.0, 1.0]]


async def test_calls_that_overlap_are_told_apart() -> None:
    async def agent(llm: Policy, start: int) -> None:
        so_far = [start]
        for _ in range(2):
            so_far = (await llm.generate(so_far)).ids

    async def play(task: Task, llm: Policy) -> float:
        await asyncio.gather(agent(llm, 5), agent(llm, 6))
        return 1.0

    scene, trajectory = await played(play, by_number)
    assert [len(request.prompt_ids) for request in scene.engine.requests] == [1, 1, 4, 4]
    assert [row.tokens.tolist() for row in merge_turns(trajectory)] == [[5, 20, 21, 22, 40, 41, 42], [6, 30, 31, 32, 50, 51, 52]]
    assert [turn.number for turn in trajectory.turns] == [0, 2, 1, 3]


def test_a_prompt_goes_on_with_the_longest_context_that_it_begins_with() -> None:
    recorder = Recorder("e", engine=ScriptedEngine(), codec=CODEC, settings=PATIENT, seed_of=lambda number: None)
    short, long, other = recorder.contexts = [Context(tokens=tokens) for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 9])]

    def longest(*prompt_ids: int) -> Context | None:
        return recorder.longest(SimpleNamespace(prompt_ids=list(prompt_ids), placed=()))  # type: ignore[arg-type]

    assert longest(1, 2, 3, 4, 5) is long
    assert longest(1, 2, 3, 5) is short  # all but the last token of another
    assert longest(1, 2, 9, 1) is other
    assert longest(1) is longest(1, 3) is None


async def test_the_same_prompt_twice_is_two_branches_and_the_longest_fit_goes_on() -> None:
    async def play(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        second = await llm.generate([5])
        await llm.generate([*second.ids, 8])
        return 1.0

    _, trajectory = await played(play, by_number)
    assert [row.tokens.tolist() for row in merge_turns(trajectory)] == [[5, 20, 21, 22], [5, 30, 31, 32, 8, 40, 41, 42]]


async def test_what_is_discarded_is_not_trained() -> None:
    async def play(task: Task, llm: Policy) -> float:
        bad = await llm.generate([5])
        await llm.generate([5])
        llm.discard(bad)
        return 1.0

    _, trajectory = await played(play, by_number)
    assert [row.tokens.tolist() for row in merge_turns(trajectory)] == [[5, 30, 31, 32]]


async def test_what_a_call_is_told() -> None:
    async def play(task: Task, llm: Policy) -> float:
        assert (llm.sampling.max_tokens, llm.max_length, llm.tokenizer.eos_token) == (32, 90, "<|im_end|>")
        assert llm.decode(llm.encode("a <|im_end|>")) == "a <|im_end|>"
        done = await llm.generate([5] * 80, {"stop_token_ids": [77], "seed": 3})
        assert (len(done.token_ids), done.finish_reason, set(done.versions)) == (10, "length", {4})
        assert done.logprobs == tuple(-(token % 7 + 1) / 8 for token in done.token_ids)
        return 1.0

    scene = Scene(executor(play), ScriptedEngine(version=4), changed(PATIENT, max_episode_tokens=90))
    trajectory = await scene.play()
    assert trajectory.error is None
    assert scene.engine.requests[0].sampling == Sampling(max_tokens=10, seed=3, stop_token_ids=(77, *CODEC.end_token_ids))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "file.py: Own.execute returned reward = None: must be a number"),
        (float("nan"), "Own.execute returned reward = nan: must be finite"),
        (StepResult(1.0, score=7.0), "Own.execute returned score = 7.0: must lie in 0..1"),
        (StepResult(1.0, "next"), "Own.execute returned observation = 'next': has no meaning at the end"),
        (StepResult(1.0, rewards={"ann": 1.0}), "Own.execute returned rewards = {'ann': 1.0}: has no meaning"),
        ({"reward": 1.0}, "Own.execute returned reward = {'reward': 1.0}: must be a number"),
    ],
)
async def test_a_bad_result_is_an_error_with_its_place(value: Any, message: str) -> None:
    async def play(task: Task, llm: Policy) -> Any:
        await llm.generate([5])
        return value

    _, trajectory = await played(play)
    assert (trajectory.status, trajectory.reward, trajectory.trainable) == (Status.ENV_ERROR, None, False)
    assert message in str(trajectory.error)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], None, "llm.generate returned prompt_ids = []"),
        ("text", None, "llm.encode makes them of text"),
        ([1.5], None, "must be a list of token ids"),
        ([5], {"temprature": 1}, "did you mean 'temperature'?"),
    ],
)
async def test_bad_arguments_are_errors_of_user_code(prompt: Any, sampling: Any, message: str) -> None:
    async def play(task: Task, llm: Policy) -> float:
        await llm.generate(prompt, sampling)
        return 1.0

    _, trajectory = await played(play)
    assert trajectory.status is Status.ENV_ERROR
    assert message in str(trajectory.error)


async def test_exceptions_and_failing_engines_are_told_apart() -> None:
    async def fail(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        raise KeyError("lost")

    _, trajectory = await played(fail)
    assert trajectory.status is Status.ENV_ERROR
    assert "Own.execute raised KeyError: 'lost'" in str(trajectory.error)
    assert len(trajectory.turns) == 1  # recorded, not trained

    async def call(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        return 1.0

    _, trajectory = await played(call, lambda request: EngineError("broken"))
    assert (trajectory.status, trajectory.error) == (Status.ENGINE_ERROR, "EngineError: broken")

    async def recover(task: Task, llm: Policy) -> float:
        try:
            await llm.generate([5] * 300)
        except ContextLengthError:
            await llm.generate([5])
        return 1.0

    _, trajectory = await played(recover)
    assert (trajectory.status, len(trajectory.turns)) == (Status.FINISHED, 1)


async def test_without_a_call_there_is_nothing_to_train() -> None:
    async def play(task: Task, llm: Policy) -> float:
        return 1.0

    _, trajectory = await played(play)
    assert (trajectory.status, trajectory.reward, trajectory.trainable) == (Status.FINISHED, 1.0, False)


async def test_truncation_and_penalties() -> None:
    async def play(task: Task, llm: Policy) -> StepResult:
        await llm.generate([5], {"max_tokens": 4})
        return StepResult(1.0, truncated=True)

    _, trajectory = await played(play, overlong_buffer=2, overlong_penalty=0.5)
    assert (trajectory.status, trajectory.reward, trajectory.score) == (Status.TRUNCATED, 0.5, 1.0)


async def test_an_executor_that_hangs_ends_at_the_deadline_and_is_closed() -> None:
    closed = []

    async def play(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        await asyncio.sleep(60)
        return 1.0

    _, trajectory = await played(play, methods={"close": lambda self: closed.append(True)}, episode_timeout_s=0.2)
    assert trajectory.status is Status.TIMEOUT
    assert "--episode-timeout-s" in str(trajectory.error)
    assert closed == [True]


async def test_calls_after_the_end_are_refused_and_late_answers_not_recorded() -> None:
    left: list[Any] = []

    async def play(task: Task, llm: Policy) -> float:
        await llm.generate([5])
        left.append((llm, asyncio.create_task(llm.generate([6]))))
        await asyncio.sleep(0)
        return 1.0

    scene = Scene(executor(play), ScriptedEngine(delay=lambda request: 0.05 if request.prompt_ids[0] == 6 else 0.0))
    trajectory = await scene.play()
    ((llm, late),) = left
    assert len((await late).token_ids) > 0
    assert len(trajectory.turns) == len(llm.samples) == 1
    with pytest.raises(EngineError, match="the episode is over"):
        await llm.generate([5])


@pytest.mark.parametrize(
    ("body", "message"),
    [("pass", "class Mine has no method execute"), ("def execute(self, task, llm): ...", "Mine.execute is a plain def. Write async def")],
)
def test_a_class_that_cannot_be_executed_fails_when_it_is_loaded(tmp_path: Any, body: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"from agentrl import Executor\nclass Mine(Executor):\n    {body}\n")
    with pytest.raises(EnvLoadError) as caught:
        load_agent(str(path))
    assert message in str(caught.value)
