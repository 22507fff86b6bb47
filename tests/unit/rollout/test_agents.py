"""Episodes of several agents: whose tokens, whose rewards, whose failure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl import AgentInstance, ResetResult, StepResult
from agentrl.config.sections import changed
from agentrl.core.errors import EngineError
from agentrl.core.protocols import GenerationRequest
from agentrl.core.summaries import summarize
from agentrl.core.types import Group, Status, Trajectory, derive_seed
from agentrl.learner.batch import merge_turns
from agentrl.rollout.records import group_records
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import CODEC, PATIENT, TASK, Scene
from tests.unit.rollout.test_episode import dialogue, text_of

pytestmark = pytest.mark.anyio

Answer = Callable[[GenerationRequest], list[int]]


def say(**texts: Sequence[str]) -> Answer:
    """Texts by agent, one per turn of its own."""

    def answer(request: GenerationRequest) -> list[int]:
        _, _, _, agent, number = request.request_id.split("-")
        return CODEC.encode_text(f"{texts[agent][int(number)]}<|im_end|>")

    return answer


def duel(step: Callable[[Any], Any], reset: Any = None, **attributes: Any) -> type[AgentInstance]:
    methods = {"step": lambda self, state: step(state), "reset": lambda self, state: reset}
    return type("Duel", (AgentInstance,), {"agents": ("ann", "bob"), **methods, **attributes})


async def played(env: type[Any], answer: Answer | None = None, **changes: Any) -> tuple[Scene, dict[str, Trajectory]]:
    engine = ScriptedEngine(answer=answer) if answer else ScriptedEngine()
    scene = Scene(env, engine, changed(PATIENT, **changes))
    return scene, {trajectory.agent: trajectory for trajectory in await scene.play_all()}


def three_turns(state: Any) -> StepResult:
    if state.turn == 2:
        return StepResult(0.5, terminated=True, rewards={"bob": 0.25, "ann": 0.125}, scores={"bob": 0.9})
    return StepResult(0.1, f"{state.agent} said {state.action_text}")


async def test_each_agent_reads_and_writes_in_a_conversation_of_its_own() -> None:
    scene, agents = await played(duel(three_turns, ResetResult("Begin")), say(ann=["one", "three"], bob=["two"]))
    first, second, third = (text_of(request.prompt_ids) for request in scene.engine.requests)
    assert first == dialogue(("user", "Begin"))
    assert second == dialogue(("user", "ann said one"))
    assert third == dialogue(("user", "Begin"), ("assistant", "one"), ("user", "bob said two"))
    ann, bob = agents["ann"], agents["bob"]
    assert [turn.number for turn in ann.turns] == [0, 2]
    assert [turn.number for turn in bob.turns] == [1]
    (row,) = merge_turns(ann)
    assert row.tokens.tolist() == [*scene.engine.requests[2].prompt_ids, *ann.turns[1].token_ids]
    assert text_of(bob.turns[0].token_ids) == "two<|im_end|>"
    assert (ann.episode_id, bob.episode_id) == ("3-0-0", "3-0-0")
    assert (ann.trajectory_id, bob.trajectory_id) == ("3-0-0-ann", "3-0-0-bob")
    assert {request.session for request in scene.engine.requests} == {"3-0-0-ann", "3-0-0-bob"}


async def test_rewards_go_to_the_last_turn_of_whom_they_are_for() -> None:
    _, agents = await played(duel(three_turns), say(ann=["one", "three"], bob=["two"]))
    assert [turn.reward for turn in agents["ann"].turns] == [0.1, 0.625]
    assert [turn.reward for turn in agents["bob"].turns] == [0.35]
    assert (agents["ann"].reward, agents["ann"].score) == (0.725, 0.725)
    assert (agents["bob"].reward, agents["bob"].score) == (0.35, 0.9)


async def test_a_reward_before_the_first_turn_is_part_of_that_turn() -> None:
    def step(state: Any) -> StepResult:
        return StepResult(1.0, "go", rewards={"bob": -0.5}) if state.turn == 0 else StepResult(2.0, terminated=True)

    _, agents = await played(duel(step))
    assert (agents["ann"].reward, agents["bob"].reward) == (1.0, 1.5)
    assert [turn.reward for turn in agents["bob"].turns] == [1.5]


async def test_who_never_acts_has_a_reward_but_nothing_to_train() -> None:
    _, agents = await played(duel(lambda state: StepResult(1.0, terminated=True, rewards={"bob": -1.0})))
    assert agents["ann"].trainable
    assert (agents["bob"].turns, agents["bob"].reward, agents["bob"].trainable) == ((), -1.0, False)
    assert agents["bob"].status is Status.FINISHED


async def test_the_environment_decides_who_acts() -> None:
    def step(state: Any) -> StepResult:
        order.append((state.turn, state.agent))
        return StepResult(0.0, "go", agent={0: "bob", 1: "bob", 2: "cat"}.get(state.turn))

    order: list[tuple[int, str]] = []
    await played(duel(step, ResetResult(agent="cat"), agents=("ann", "bob", "cat")), max_turns=5)
    assert order == [(0, "cat"), (1, "bob"), (2, "bob"), (3, "cat"), (4, "ann")]


async def test_openings_come_before_what_an_agent_is_told_first() -> None:
    rules = {"ann": [{"role": "system", "content": "You are Ann."}], "bob": "You are Bob."}
    reset = ResetResult("Begin", observations=rules)
    scene, _ = await played(duel(three_turns, reset), say(ann=["one", "three"], bob=["two"]))
    first, second, third = (text_of(request.prompt_ids) for request in scene.engine.requests)
    assert first == dialogue(("system", "You are Ann."), ("user", "Begin"))
    assert second == dialogue(("user", "You are Bob.\nann said one"))
    assert third == dialogue(("system", "You are Ann."), ("user", "Begin"), ("assistant", "one"), ("user", "bob said two"))


async def test_who_is_told_nothing_reads_the_opening_or_else_the_task() -> None:
    scene, _ = await played(duel(lambda state: StepResult(0.0), ResetResult(observations={"bob": "Hi Bob"})), max_turns=2)
    assert [text_of(request.prompt_ids) for request in scene.engine.requests] == [
        dialogue(("user", str(TASK.prompt))),
        dialogue(("user", "Hi Bob")),
    ]


async def test_what_step_is_told_of_the_agent() -> None:
    seen: list[Any] = []

    def step(state: Any) -> StepResult:
        seen.append(state)
        return three_turns(state)

    await played(duel(step), say(ann=["one", "three"], bob=["two"]))
    assert [(state.agent, state.turn, state.action_text) for state in seen] == [("ann", 0, "one"), ("bob", 1, "two"), ("ann", 2, "three")]
    assert seen[1].observation_text == dialogue(("user", "ann said one"))
    assert seen[2].observation_text.endswith("bob said two<|im_end|>\n<|im_start|>assistant\n")


async def test_sampling_of_reset_is_for_all_and_that_of_a_step_for_whom_it_addresses() -> None:
    def step(state: Any) -> StepResult:
        return StepResult(0.0, "go", sampling={"max_tokens": 2} if state.agent == "ann" else None)

    scene, _ = await played(duel(step, ResetResult(sampling={"temperature": 0.5})))
    sampled = [request.sampling for request in scene.engine.requests]
    assert [s.temperature for s in sampled] == [0.5] * 4
    assert [s.max_tokens for s in sampled] == [32, 2, 32, 2]


async def test_seeds_differ_by_agent_and_the_first_agents_are_those_of_an_agent_alone() -> None:
    scene, _ = await played(duel(lambda state: StepResult(0.0, "go")))
    seeds = [request.sampling.seed for request in scene.engine.requests]
    assert seeds[0::2] == [derive_seed(5, "sum", 0, 0, 0), derive_seed(5, "sum", 0, 0, 1)]
    assert seeds[1::2] == [derive_seed(5, "sum", 0, 0, 0, "bob"), derive_seed(5, "sum", 0, 0, 1, "bob")]


async def test_turns_are_counted_together_and_tokens_apart() -> None:
    _, agents = await played(duel(lambda state: StepResult(0.1, "go")), max_turns=3)
    assert {agent.status for agent in agents.values()} == {Status.TRUNCATED}
    assert [len(agent.turns) for agent in agents.values()] == [2, 1]
    _, agents = await played(duel(lambda state: StepResult(0.1, "go")), max_turns=50, max_episode_tokens=90)
    sizes = [sum(len(turn.prompt_ids) + len(turn.token_ids) for turn in agent.turns) for agent in agents.values()]
    assert max(sizes) <= 90 < sum(sizes)


@pytest.mark.parametrize("fails_at", [0, 1])
async def test_a_failure_is_that_of_every_agent(fails_at: int) -> None:
    def step(state: Any) -> StepResult:
        return StepResult(1 / (fails_at - state.turn), "go")

    _, agents = await played(duel(step))
    assert {(agent.status, agent.reward, agent.trainable) for agent in agents.values()} == {(Status.ENV_ERROR, None, False)}
    assert all("ZeroDivisionError" in str(agent.error) for agent in agents.values())
    assert [agent.unanswered is not None for agent in agents.values()] == [fails_at == 0, fails_at == 1]


async def test_a_failing_engine_is_a_status_of_every_agent() -> None:
    _, agents = await played(duel(three_turns), lambda request: EngineError("broken"))  # type: ignore[arg-type, return-value]
    assert {agent.status for agent in agents.values()} == {Status.ENGINE_ERROR}


@pytest.mark.parametrize(
    ("reset", "step", "message"),
    [
        (
            ResetResult(agent="eve"),
            None,
            "file.py: Duel.reset returned agent = 'eve': is none of the environment's agents; there are ann",
        ),
        (ResetResult(observations={"bop": "x"}), None, "Duel.reset returned a key of observations = 'bop'"),
        (ResetResult(observations={"bob": 3}), None, "Duel.reset returned observations['bob'] = 3"),  # type: ignore[dict-item]
        (
            None,
            StepResult(0.0, "x", agent="bop"),
            "returned agent = 'bop': is none of the environment's agents; did you mean 'bob'?",
        ),
        (None, StepResult(rewards={"eve": 1.0}, terminated=True), "Duel.step returned a key of rewards = 'eve'"),
        (None, StepResult(rewards={"bob": float("nan")}, terminated=True), "Duel.step returned rewards['bob'] = nan"),
        (None, StepResult(rewards=[1.0], terminated=True), "Duel.step returned rewards = [1.0] (list): must be a dictionary"),  # type: ignore[arg-type]
        (None, StepResult(scores={"bob": 2.0}, terminated=True), "Duel.step returned scores['bob'] = 2.0: must lie in 0..1"),
        (None, StepResult(0.0, agent="ann"), "Duel.step returned observation = None: agent 'ann' acts next"),
        (None, StepResult(0.0, "x " * 300), "the first prompt of task 'sum' for agent 'bob' has"),
    ],
)
async def test_bad_results_name_the_place_and_the_value(reset: Any, step: Any, message: str) -> None:
    _, agents = await played(duel(lambda state: step, reset))
    assert {agent.status for agent in agents.values()} == {Status.ENV_ERROR}
    assert message in str(agents["ann"].error)


async def test_agents_in_an_environment_without_any_are_refused() -> None:
    scene = Scene(duel(lambda state: StepResult(0.0, terminated=True, rewards={"ann": 1.0}), agents=()))
    trajectory = await scene.play()
    assert "returned a key of rewards = 'ann': the environment names no agents; set the class attribute agents" in str(trajectory.error)


async def test_a_frozen_agent_plays_and_is_recorded_but_not_trained() -> None:
    scene, agents = await played(duel(three_turns, trained_agents=("bob",)), say(ann=["one", "three"], bob=["two"]))
    assert [(agent.frozen, agent.trainable, agent.reward) for agent in agents.values()] == [(True, False, 0.725), (False, True, 0.35)]
    group = Group(group_id=3, task=TASK, trajectories=tuple(agents.values()))
    assert group.trainable == (agents["bob"],)
    assert summarize(group, seconds=1.0).num_trainable == 1
    records = group_records(replace(scene.group_request, record=1), group)
    assert [(record["agent"], record["frozen"], len(record["turns"])) for record in records] == [("ann", True, 2), ("bob", False, 1)]


async def test_records_are_counted_by_episodes() -> None:
    scene = Scene(duel(three_turns), ScriptedEngine(answer=say(ann=["one", "three"], bob=["two"])))
    group = Group(group_id=3, task=TASK, trajectories=(*await scene.play_all(0), *await scene.play_all(1)))
    records = group_records(replace(scene.group_request, record=1), group)
    assert [record["trajectory_id"] for record in records] == ["3-0-0-ann", "3-0-0-bob"]
    assert len(group_records(replace(scene.group_request, record=2), group)) == 4
    assert group_records(scene.group_request, group) == ()
    summary = summarize(group, seconds=1.0)
    assert ([len(episode) for episode in summary.episodes], len(summary.members), summary.num_trainable) == ([2, 2], 4, 2)


async def test_penalties_are_paid_by_whom_they_concern() -> None:
    _, agents = await played(duel(three_turns), max_new_tokens=4)
    _, punished = await played(duel(three_turns), max_new_tokens=4, overlong_buffer=2)
    assert punished["ann"].reward == pytest.approx((agents["ann"].reward or 0.0) - 2.0)
    assert punished["bob"].reward == pytest.approx((agents["bob"].reward or 0.0) - 1.0)
    assert punished["bob"].score == agents["bob"].score
