"""gymnasium environments as an agent's environment, on the real package."""

import contextlib
import itertools
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from agentrl import AgentInstance, ResetState, StepResult, StepState, Task
from agentrl.core.errors import EnvLoadError
from agentrl.env.results import check_step
from agentrl.suites.gymnasium import TOY_TEXT, GymEnv, last_word
from agentrl.suites.gymnasium_vector import load_gym
from agentrl.suites.load import load_agent

LAKE = "gym:FrozenLake-v1?is_slippery=False"
TO_THE_GOAL = ("down", "down", "right", "right", "down", "right")


class Scripted(gymnasium.Env[int, int]):
    """Counts its steps; ends or is cut as told."""

    opened: ClassVar[list["Scripted"]] = []

    def __init__(self, space: Any = None, end_at: int = 99, cut_at: int = 99) -> None:
        self.action_space = space if space is not None else spaces.Discrete(3)
        self.observation_space = spaces.Discrete(100)
        self.end_at, self.cut_at, self.actions, self.seed, self.closed = end_at, cut_at, [], None, False
        self.opened.append(self)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seed = seed
        return 0, {"mood": "fresh"}

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        now = len(self.actions)
        return now, np.float32(0.5), np.bool_(now == self.end_at), now == self.cut_at, {}

    def close(self) -> None:
        self.closed = True


def scripted(space: Any = None, *, end_at: int = 99, cut_at: int = 99, **attributes: Any) -> type[GymEnv]:
    return type("Some", (GymEnv,), {"make": lambda self: Scripted(space, end_at, cut_at), **attributes})


def begin(cls: type[AgentInstance], seed: int = 0) -> tuple[Any, str]:
    env = cls()
    task = Task("x", seed=seed)
    return env, env.reset(ResetState(task=task, observation=task.prompt, label=None, seed=seed)).observation


def registered(name: str) -> str:
    """The newest version of an environment."""
    return max(env_id for env_id in gymnasium.registry if env_id.partition("-v")[0] == name)


def say(env: Any, text: str) -> StepResult:
    return check_step(env.step(StepState(action_text=text)), "test")


def text(result: StepResult) -> str:
    return result.observation[0]["content"]


def test_frozen_lake_from_start_to_goal() -> None:
    env, first = begin(load_agent(LAKE).load())
    assert first == "P you, F ice, H hole, G goal.\nPFFF\nFHFH\nFFFH\nHFFG\nMove: up, down, left or right?"
    results = [say(env, move) for move in TO_THE_GOAL]
    assert text(results[0]).startswith("SFFF\nPHFH")
    assert [r.reward for r in results] == [0, 0, 0, 0, 0, 1]
    assert [r.terminated for r in results] == [False] * 5 + [True]
    env.close()


def test_a_hole_ends_the_episode_without_reward() -> None:
    env, _ = begin(load_agent(LAKE).load())
    say(env, "right")
    result = say(env, "Let me go DOWN.")
    assert (result.reward, result.terminated, result.truncated) == (0.0, True, False)


def test_the_environments_own_time_limit_is_a_truncation() -> None:
    env, _ = begin(load_gym(LAKE + "&max_episode_steps=2"))
    assert not say(env, "up").truncated
    result = say(env, "up")
    assert (result.terminated, result.truncated) == (False, True)


def test_blackjack_rewards_and_seeds() -> None:
    cls = load_gym("gym:Blackjack-v1")
    firsts = [begin(cls, seed)[1] for seed in (1, 1, 2, 3, 4)]
    assert firsts[0] == firsts[1]
    assert len(set(firsts)) > 2
    env, first = begin(cls, 5)
    assert first.endswith("Choose: hit or stick?")
    result = say(env, "stick")
    assert result.terminated
    assert result.reward in (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("name", sorted(TOY_TEXT))
def test_every_word_of_toy_text_is_an_action_it_asks_for(name: str) -> None:
    env, first = begin(load_gym(f"gym:{registered(name)}"))
    for word in env.actions:
        assert env.parse_action(word) in range(env.env.action_space.n)
        assert word in first
        assert word in env.ask()
    assert sorted(env.actions.values()) == list(range(env.env.action_space.n))


def test_success_where_rewards_are_costs() -> None:
    env, _ = begin(load_gym("gym:CliffWalking-v1"))
    results = [say(env, move) for move in ("up", *["right"] * 11, "down")]
    assert sum(r.reward for r in results) == -13
    assert [r.score for r in results] == [0.0] * 12 + [1.0]


def test_an_answer_without_an_action_is_asked_again_then_ends() -> None:
    env, _ = begin(scripted(max_invalid=2, invalid_reward=-0.25))
    for _ in range(2):
        result = say(env, "hm")
        assert (result.reward, result.terminated, result.info) == (-0.25, False, {"invalid_action": 1.0})
        assert text(result) == "Choose a number from 0 to 2."
    assert say(env, "2").info == {"invalid_action": 0.0}
    assert [say(env, "hm").terminated for _ in range(3)] == [False, False, True]
    assert env.env.actions == [2]


def test_invalid_answers_may_end_at_once_and_are_no_success() -> None:
    env, _ = begin(scripted(max_invalid=0))
    say(env, "1")
    result = say(env, "17")
    assert (result.reward, result.score, result.terminated) == (0.0, 0.0, True)


@pytest.mark.parametrize(("end_at", "cut_at"), [(1, 99), (99, 1), (1, 1)])
def test_terminated_and_truncated_stay_apart(end_at: int, cut_at: int) -> None:
    env, _ = begin(scripted(end_at=end_at, cut_at=cut_at))
    result = say(env, "0")
    assert (result.terminated, result.truncated) == (end_at == 1, cut_at == 1)
    assert result.reward == 0.5


def test_one_environment_per_episode_seeded_and_closed() -> None:
    Scripted.opened.clear()
    (a, _), (b, _) = begin(scripted(), 7), begin(scripted(), 2**40 + 9)
    assert [env.seed for env in Scripted.opened] == [7, 9]
    a.close()
    assert [env.closed for env in Scripted.opened] == [True, False]
    b.close()
    scripted()().close()  # before reset


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        (spaces.Discrete(3, start=-1), "I take -1", -1),
        (spaces.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1]),
        (spaces.MultiDiscrete([2, 3]), "[1,2]", [1, 2]),
        (spaces.MultiBinary(2), "[1,0]", [1, 0]),
        (spaces.Text(5), "hello", "hello"),
        (spaces.Dict(go=spaces.Discrete(2), where=spaces.Tuple((spaces.Discrete(9),))), '{"go":1,"where":[8]}', {"go": 1, "where": (8,)}),
    ],
)
def test_actions_of_every_kind_of_space(space: Any, answer: str, action: Any) -> None:
    env, _ = begin(scripted(space))
    parsed = env.parse_action(answer)
    assert space.contains(parsed)
    assert np.array_equal(parsed, action) if not isinstance(action, dict) else parsed == action


SPACES = [spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]), spaces.Text(3)]
SPACES += [spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple((spaces.Box(0, 1, ()),))), spaces.MultiBinary(3)]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@given(index=st.integers(0, len(SPACES) - 1), answer=st.text() | JSON.map(repr) | JSON.map(lambda v: str(v).replace("'", '"')))
def test_whatever_is_said_is_an_action_or_a_value_error(index: int, answer: str) -> None:
    env = scripted(SPACES[index])()
    env.env = env.make()
    with contextlib.suppress(ValueError):
        assert SPACES[index].contains(env.parse_action(answer))


def test_deep_nesting_and_huge_numbers_are_refused() -> None:
    env, _ = begin(scripted(spaces.Box(-1, 1, (2,))))
    for answer in ("[" * 100_000, "[1e999, 0]", "[" + "9" * 5000 + ", 0]"):
        with pytest.raises(ValueError, match="JSON"):
            env.parse_action(answer)
    env, _ = begin(scripted())
    with pytest.raises(ValueError, match="0 to 2"):
        env.parse_action("9" * 10_000)


def test_the_last_word_counts_and_only_whole_words() -> None:
    words = {"up": 1, "upper left": 2, "Down": 3}
    assert last_word("not UP, rather down", words) == 3
    assert last_word("upper left", words) == 2
    with pytest.raises(ValueError, match="none of"):
        last_word("cup update", words)


def test_tasks_have_no_end_or_a_number_of_seeds() -> None:
    endless = list(itertools.islice(load_gym(LAKE).tasks(), 3))
    assert [(task.id, task.seed) for task in endless] == [("0", None), ("1", None), ("2", None)]
    assert [task.seed for task in load_gym(LAKE + "&num_tasks=3").tasks()] == [0, 1, 2]


def test_options_reach_the_environment() -> None:
    cls = load_gym("gym:FrozenLake-v1?map_name=8x8&is_slippery=False&max_invalid=0&invalid_reward=-1")
    env, first = begin(cls)
    assert cls.__name__ == "FrozenLake"
    assert "PFFFFFFF\n" in first
    assert (env.max_invalid, env.invalid_reward) == (0, -1)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("gym:", "Malformed"),
        ("gym:FrozenLak-v1", "Did you mean: `FrozenLake`?"),
        ("gym:FrozenLake-v1?slippery=False", "unexpected keyword argument 'slippery'"),
        ("gym:FrozenLake-v1?num_tasks=0", "num_tasks = 0 is out of range"),
        ("gym:FrozenLake-v1?max_invalid=often", "max_invalid = 'often'"),
    ],
)
def test_a_wrong_specification_is_refused_at_once(spec: str, problem: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert problem in caught.value.problem
    assert "?. " not in str(caught.value)
    assert caught.value.field == "--agent"


def test_a_step_before_reset_says_so() -> None:
    with pytest.raises(RuntimeError, match="before reset"):
        scripted()().parse_action("1")


@pytest.mark.parametrize("env_id", [LAKE.replace("False", "True"), "gym:Blackjack-v1", "gym:Taxi-v4", "gym:CartPole-v1"])
def test_a_copy_goes_on_as_the_original_would(env_id: str) -> None:
    """Random numbers, the limit of steps and what the class itself counts are those of the copied moment."""
    spec = env_id if "Taxi" not in env_id else f"gym:{registered('Taxi')}"
    env, _ = begin(load_gym(spec), 3)
    words = list(env.actions) or ["0", "1"]
    moves = [words[(3 * number) % len(words)] for number in range(8)]
    played = next((n for n, move in enumerate(moves[:3]) if say(env, move).terminated), 3)
    copies = [type(env)() for _ in range(2)]
    for other, snapshot in zip(copies, [env.snapshot(), env.snapshot()], strict=True):
        other.restore(snapshot)
    expected = [vars_of(say(env, move)) for move in ["nothing at all", *moves[played:]]]
    for other in copies:
        assert [vars_of(say(other, move)) for move in ["nothing at all", *moves[played:]]] == expected
        other.close()


def vars_of(result: StepResult) -> tuple[Any, ...]:
    return result.reward, str(result.observation), result.terminated, result.truncated, result.score
