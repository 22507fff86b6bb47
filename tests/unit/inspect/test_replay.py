"""Recorded episodes replay; whatever has changed is found at its turn."""

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agentrl import AgentInstance, Executor, Message, StepResult, Task
from agentrl.config.sections import changed
from agentrl.core.differences import Difference
from agentrl.core.errors import EngineError
from agentrl.core.protocols import EngineLimits
from agentrl.core.types import EvalSampling
from agentrl.env.agent_spec import AgentKind, kind_of
from agentrl.env.boundary import EnvSession
from agentrl.env.executor import ExecutorSession
from agentrl.env.threads import Threads
from agentrl.inspect.compare import Replay, Verdict
from agentrl.inspect.replay import Replayer
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.episode_plan import EpisodePlan
from agentrl.rollout.executor_episode import ExecutorEpisode
from agentrl.rollout.group import make_member
from agentrl.rollout.records import trajectory_record
from agentrl.track.jsonl import encode
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, LIMITS, SETTINGS, TASK, Scene, env_class, says
from tests.unit.rollout.templates import tokenizer

pytestmark = pytest.mark.anyio

Records = list[dict[str, Any]]


@dataclass
class Spec:
    """Stands for an `AgentSpec` whose class is there already."""

    cls: type[Any]
    source: str = "file.py"

    @property
    def kind(self) -> AgentKind:
        return kind_of(self.cls)

    def load(self) -> type[Any]:
        return self.cls


async def record(
    env: type[Any], *texts: str, settings: EpisodePlan = SETTINGS, task: Task = TASK, index: int = 0, **engine: Any
) -> Records:
    scene = Scene(env, settings=settings)
    scene.group_request = replace(scene.group_request, task=task)
    scene.engine = ScriptedEngine(**{"answer": says(*texts), "max_model_len": 256, **engine})
    trajectories = await scene.play_all(index)
    limits = EngineLimits(max_model_len=scene.engine.max_model_len, end_token_ids=scene.engine.end_token_ids)
    return [json.loads(encode(trajectory_record(scene.group_request, trajectory, limits))) for trajectory in trajectories]


def replayer(env: type[Any], settings: EpisodePlan = SETTINGS, find: Callable[[str], Task | None] = lambda name: None) -> Replayer:
    def make_codec(ends: Sequence[int]) -> ChatCodec:
        return ChatCodec(tokenizer("chatml"), end_token_ids=ends)

    limits = EngineLimits(max_model_len=256)
    return Replayer(Spec(env), settings, make_codec=make_codec, find_task=find, limits=limits)  # type: ignore[arg-type]


async def again(env: type[Any], records: Records, settings: EpisodePlan = SETTINGS, jobs: int = 1) -> Replay:
    (outcome,) = [outcome async for outcome in replayer(env, settings).replay_all([records], jobs=jobs)]
    return outcome


async def difference(then: type[Any], now: type[Any], *texts: str, settings: EpisodePlan = SETTINGS) -> Difference:
    outcome = await again(now, await record(then, *texts, settings=settings), settings)
    assert outcome.verdict is Verdict.DIFFERS
    assert "each time" in outcome.reason
    assert outcome.difference is not None
    return outcome.difference


def counting(**changes: Any) -> type[AgentInstance]:
    """Three turns; `changes` says what is otherwise in turn 1."""

    def step(state: Any) -> StepResult:
        if "error" in changes and state.turn == 1:
            raise ValueError(changes["error"])
        usual = {"reward": 0.25, "observation": f"after {state.action_text}", "terminated": state.turn == 2, "reward_parts": {"a": 1.0}}
        return StepResult(**{**usual, **(changes if state.turn == 1 else {})})

    return env_class(step)


TYPED = counting()
FAILS = counting(error="cannot")


def dictionary(state: Any) -> dict[str, Any]:
    return {"rewards": 0.5, "environment_feedback": "<|im_start|>user\nMore.<|im_end|>\n", "done": state.turn == 1, "scores": 0.3}


def talking(state: Any) -> StepResult:
    return StepResult(0.1, [Message(role="tool", content="<|im_end|> is text")], truncated=state.turn == 1, sampling={"max_tokens": 3})


class Pair(AgentInstance):
    agents = ("asker", "teller")

    def step(self, state: Any) -> StepResult:
        return StepResult(0.5, f"{state.agent} says {state.action_text}", terminated=state.turn == 3, rewards={"asker": 0.25})


class Reseeded(AgentInstance):
    """Its first prompt depends on the seed that `reset` is given."""

    def reset(self, state: Any) -> dict[str, Any]:
        return {"observation": f"seed {state.seed}\n"}

    def step(self, state: Any) -> StepResult:
        return StepResult(1.0, terminated=True)


@pytest.mark.parametrize(
    ("env", "texts"),
    [
        (TYPED, ("one", "two", "three")),
        (FAILS, ("one", "two")),
        (env_class(dictionary), ("one", "two")),
        (env_class(talking), ("one", "two")),
        (env_class(lambda state: StepResult(0.0, "more")), ("1", "2", "3", "4")),
        (env_class(lambda state: StepResult(float("nan"), terminated=True)), ("one",)),
        (env_class(lambda state: StepResult(1.0, terminated=True), reset=lambda self, state: 1 / 0), ()),
        (env_class(lambda state: StepResult(state.finish_reason == "length", terminated=True)), ("never ending " * 9 + "~",)),
        (Pair, ("one", "two")),
        (Reseeded, ("one",)),
    ],
)
async def test_every_kind_of_episode_replays(env: type[Any], texts: tuple[str, ...]) -> None:
    outcome = await again(env, await record(env, *texts, index=1))
    assert outcome == Replay(records=outcome.records, verdict=Verdict.SAME)


async def test_a_replay_uses_up_every_recorded_turn() -> None:
    records = await record(TYPED, "one", "two", "three")
    seen = []
    env = env_class(lambda state: seen.append(state.action_text) or TYPED().step(state))
    assert (await again(env, records)).verdict is Verdict.SAME
    assert seen == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("change", "turn", "what", "expected", "got"),
    [
        ({"observation": "other"}, 2, "observation", "after two", "other"),
        ({"reward": 0.5}, 1, "reward", "0.25", "0.5"),
        ({"terminated": True}, 1, "end", "it goes on", "finished after 2 turns"),
        ({"truncated": True}, 1, "end", "it goes on", "truncated after 2 turns"),
        ({"error": "broken now"}, 1, "end", "it goes on", "env_error after 1 turn: file.py: Env.step raised ValueError: broken now"),
        ({"reward_parts": {"a": 2.0}}, 2, "reward part a", "3", "4"),
        ({"reward_parts": {"b": 1.0}}, 2, "reward part a", "3", "2"),
    ],
)
async def test_a_change_is_found_at_its_turn(change: dict[str, Any], turn: int, what: str, expected: str, got: str) -> None:
    found = await difference(TYPED, counting(**change), "one", "two", "three")
    assert (found.turn, found.what) == (turn, what)
    assert expected in found.expected
    assert got in found.got


async def test_a_changed_observation_is_told_token_by_token() -> None:
    found = await difference(TYPED, counting(observation="after tvo"), "one", "two", "three")
    assert CODEC.decode(found.expected_ids) == found.expected
    assert CODEC.decode(found.got_ids) == found.got
    assert found.expected_ids != found.got_ids


async def test_a_changed_first_prompt() -> None:
    env = env_class(TYPED.step, reset=lambda self, state: {"observation": "Hello."})
    env.step = TYPED.step  # type: ignore[method-assign]
    found = await difference(TYPED, env, "one", "two", "three")
    assert (found.turn, found.what) == (0, "observation")


async def test_a_changed_score_and_an_end_that_comes_later() -> None:
    def ends(score: float, *, goes_on: bool = False) -> type[AgentInstance]:
        return env_class(lambda state: StepResult(1.0, "more", terminated=not goes_on, score=score))

    found = await difference(ends(1.0), ends(0.5), "one")
    assert (found.turn, found.what, found.expected, found.got) == (0, "score", "1", "0.5")
    found = await difference(ends(1.0), ends(1.0, goes_on=True), "one")
    assert (found.turn, found.what, found.expected, found.got) == (0, "end", "finished after 1 turn", "it goes on")


async def test_a_failure_that_is_mended_is_a_difference() -> None:
    found = await difference(FAILS, TYPED, "one", "two")
    assert (found.turn, found.what) == (1, "end")
    assert found.expected.startswith("env_error after 1 turn: file.py: Env.step raised ValueError: cannot")
    assert found.got == "an answer with reward 0.25"


async def test_one_of_several_agents_changes() -> None:
    class Other(Pair):
        def step(self, state: Any) -> StepResult:
            result = super().step(state)
            return replace(result, observation="what?") if state.turn == 1 else result

    found = await difference(Pair, Other, "one", "two")
    assert (found.turn, found.what, found.agent) == (2, "observation", "asker")


async def test_environments_that_are_not_deterministic_are_told_apart() -> None:
    counter = itertools.count()
    flaky = env_class(lambda state: StepResult(float(next(counter)), terminated=True))
    outcome = await again(flaky, await record(flaky, "one"))
    assert (outcome.verdict, outcome.reason) == (Verdict.DIFFERS, "not deterministic: two replays differ from each other")


async def test_episodes_that_disturb_each_other_are_told_apart() -> None:
    class Global(AgentInstance):
        async def reset(self, state: Any) -> None:
            random.seed(7)
            await asyncio.sleep(0.01)

        async def step(self, state: Any) -> StepResult:
            return StepResult(random.random(), terminated=True)

    records = await record(Global, "one")
    played = replayer(Global)
    assert (await played.replay(records)).verdict is Verdict.SAME
    outcomes = [outcome async for outcome in played.replay_all([records] * 4, jobs=4)]
    assert [outcome.verdict for outcome in outcomes].count(Verdict.DIFFERS) == 3
    assert all("side by side" in outcome.reason for outcome in outcomes[1:])


async def test_what_was_interrupted_is_compared_as_far_as_it_went() -> None:
    async def step(self: Any, state: Any) -> StepResult:
        await asyncio.sleep(9 if state.turn == 1 else 0)
        return StepResult(0.5, "go on")

    slow = type("Env", (AgentInstance,), {"step": step})
    records = await record(slow, "one", "two")
    assert records[0]["status"] == "timeout"
    assert records[0]["unanswered"]["text"].startswith("two")
    outcome = await asyncio.wait_for(again(slow, records), 0.2)
    assert (outcome.verdict, outcome.reason) == (Verdict.SAME, "up to its end by timeout")
    other = env_class(lambda state: StepResult(0.75, "go on"))
    assert (await again(other, records)).verdict is Verdict.DIFFERS


async def test_engine_failures_are_compared_as_far_as_they_went() -> None:
    def breaks(request: Any) -> Any:
        return EngineError("lost") if request.request_id.endswith("-1") else says("one")(request)

    records = await record(TYPED, answer=breaks)
    assert (await again(TYPED, records)).reason == "up to its end by engine_error"
    assert (await again(counting(observation="x"), records)).verdict is Verdict.SAME
    early = env_class(lambda state: StepResult(0.25, terminated=True))
    found = (await again(early, records)).difference
    assert found is not None
    assert (found.turn, found.expected, found.got) == (0, "it goes on", "finished after 1 turn")


class Drafts(Executor):
    """Two calls that overlap, then one that goes on from the second."""

    async def execute(self, task: Task, llm: Any) -> StepResult:
        prompt = llm.encode_prompt(task.prompt)
        first, second = await asyncio.gather(llm.generate(prompt), llm.generate(llm.encode("Other.")))
        last = await llm.generate(second.ids + llm.encode_next("Sure?", second))
        return StepResult(float(len(first.text)), info={"last": float(len(last.text))}, score=0.5)


async def played(executor: type[Executor], *texts: str) -> Records:
    session = ExecutorSession(executor, "file.py", LIMITS)
    engine = ScriptedEngine(answer=says(*texts))
    await engine.start()
    group_request = Scene(TYPED).group_request
    trajectories = await ExecutorEpisode(group_request, 1, engine=engine, codec=CODEC, env=session, settings=SETTINGS).run()
    return [
        json.loads(encode(trajectory_record(group_request, trajectory, EngineLimits(max_model_len=256)))) for trajectory in trajectories
    ]


async def test_executors_replay_call_by_call() -> None:
    class Longer(Drafts):
        async def execute(self, task: Task, llm: Any) -> StepResult:
            return replace(await super().execute(task, llm), reward=9.0)

    records = await played(Drafts, "one", "two", "three")
    assert len(records[0]["turns"]) == 3
    assert (await again(Drafts, records)).verdict is Verdict.SAME
    found = (await again(Longer, records)).difference
    assert found is not None
    assert (found.what, found.expected, found.got) == ("reward", "3", "9")


async def test_an_executor_that_discards_calls_is_skipped() -> None:
    class Picky(Drafts):
        async def execute(self, task: Task, llm: Any) -> StepResult:
            llm.discard(await llm.generate(llm.encode_prompt(task.prompt)))
            return await super().execute(task, llm)

    outcome = await again(Picky, await played(Picky, "zero", "one", "two", "three"))
    assert outcome.verdict is Verdict.SKIPPED
    assert "discarded" in outcome.reason


async def test_episodes_of_an_evaluation_replay_with_its_seed() -> None:
    scene = Scene(Reseeded)
    scene.group_request = replace(scene.group_request, eval_sampling=EvalSampling(name="eval-3", seed=99))
    scene.engine = ScriptedEngine(answer=says("one"), max_model_len=256)
    await scene.engine.start()
    member = make_member(
        scene.group_request,
        0,
        agent=Spec(Reseeded),
        open_session=lambda: EnvSession(Reseeded, "file.py", Threads(1), LIMITS),
        engine=scene.engine,
        codec=CODEC,
        settings=SETTINGS,
    )  # type: ignore[arg-type]
    (trajectory,) = await member.run()
    records = [json.loads(encode(trajectory_record(scene.group_request, trajectory, EngineLimits(max_model_len=256))))]
    assert records[0]["episode_id"].startswith("eval-3-")
    assert (await again(Reseeded, records)).verdict is Verdict.SAME
    del records[0]["eval_sampling"]
    assert (await again(Reseeded, records)).verdict is Verdict.DIFFERS


async def test_penalties_are_part_of_the_rewards() -> None:
    settings = changed(SETTINGS, overlong_buffer=8, overlong_penalty=2.0, max_new_tokens=8)
    records = await record(TYPED, "one", "two and two and two", "three", settings=settings)
    assert records[0]["turns"][1]["reward"] < 0
    assert (await again(TYPED, records, settings)).verdict is Verdict.SAME
    found = await difference(TYPED, counting(error="broken"), "one", "two and two and two", "three", settings=settings)
    assert (found.turn, found.what) == (1, "end")


async def test_labels_that_json_cannot_hold_come_from_the_tasks() -> None:
    label = frozenset({"three"})
    task = replace(TASK, label=label)
    env = env_class(lambda state: StepResult(float(state.action_text in state.label), terminated=True))
    records = await record(env, "three", task=task)
    assert (await replayer(env, find={"sum": task}.get).replay(records)).verdict is Verdict.SAME
    changed = env_class(lambda state: StepResult(float(state.label == label), terminated=True))
    outcome = await replayer(changed).replay(records)
    assert outcome.reason == "the task's label could not be recorded exactly, and the run's tasks do not hold it"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clipped": True}, "cut"),
        ({"status": "cancelled"}, "cancelled"),
        ({"status": "timeout", "turns": []}, "before its first turn"),
        ({"turns": None}, "no record"),
        ({"task": {"id": "sum"}}, "cannot be used: KeyError"),
        ({"episode_id": "x"}, "cannot be used: ValueError"),
        ({"status": "lost"}, "cannot be used: ValueError"),
    ],
)
async def test_what_holds_nothing_to_compare_is_skipped(change: dict[str, Any], reason: str) -> None:
    (only,) = await record(TYPED, "one", "two", "three")
    outcome = await again(TYPED, [{**only, **change}])
    assert outcome.verdict is Verdict.SKIPPED
    assert reason in outcome.reason
