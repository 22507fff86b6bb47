"""Real questions of reasoning-gym."""

import itertools
import random

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.core.types import Status
from agentrl.suites.load import load_agent
from agentrl.suites.reasoning_gym import find_answer
from tests.unit.suites.suites import begin, episode, say, script, session

pytest.importorskip("reasoning_gym", exc_type=ImportError)

pytestmark = pytest.mark.anyio

SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&max_digits=1"
SPECS = [SUMS, "reasoning-gym:count_bits?max_n=63", "reasoning-gym:simple_equations?max_value=9", "reasoning-gym:spell_backward"]
SPECS += ["reasoning-gym:basic_arithmetic", "reasoning-gym:word_sorting", "reasoning-gym:gcd", "reasoning-gym:list_functions"]


def right(spec: str, seed: int) -> str:
    return load_agent(spec).load().make_item(seed)["answer"]


def judged(spec: str, answer: str, seed: int = 0) -> float:
    return say(begin(spec, seed)[0], answer).reward


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tagged", [True, False])
async def test_a_right_answer_is_paid(spec: str, tagged: bool) -> None:
    for seed in range(3):
        answer = right(spec, seed)
        text = f"Let me think. <answer>0</answer>, no: <answer> {answer}\n</answer> it is." if tagged else f" {answer}\n"
        said = await session(spec, seed, [text])
        assert said == script(spec, seed, [text])
        assert said[1] == (None, 1.0, True, False)
        assert (await session(spec, seed, ["wrong"]))[1] == (None, 0.0, True, False)


@pytest.mark.parametrize("spec", SPECS)
async def test_an_episode(spec: str) -> None:
    trajectory = await episode(spec, 5, [right(spec, 5)])
    assert trajectory.error is None
    assert (trajectory.status, trajectory.reward, trajectory.score, len(trajectory.turns)) == (Status.FINISHED, 1.0, 1.0, 1)


@pytest.mark.parametrize("score", ["exact", "full", "own"])
def test_the_right_answer_within_a_longer_one_earns_nothing(score: str) -> None:
    spec = f"{SUMS}&score={score}"
    seed = next(seed for seed in range(500) if right(spec, seed) == "7")
    env, _ = begin(spec, seed)
    assert env.own_marks("17") == 0.5  # what the data set's scorer pays
    assert [judged(spec, answer, seed) for answer in ("7", "17", "7 8 9", "0123456789")] == [1.0, 0.0, 0.0, 0.0]


def test_scores_of_answers_that_are_not_to_the_letter() -> None:
    name = "reasoning-gym:word_sorting"
    words = right(name, 0).split(", ")
    most = ", ".join([words[1], words[0], *words[2:]])
    assert judged(name, most) == judged(f"{name}?score=full", most) == 0.0
    assert 0.0 < judged(f"{name}?score=own", most) < 1.0
    spread = ",".join(words)
    assert judged(name, spread) == 0.0
    assert judged(f"{name}?score=full", spread) == judged(f"{name}?score=own", spread) == 1.0


def test_a_data_set_without_one_right_answer_needs_its_own_scorer() -> None:
    with pytest.raises(EnvLoadError, match="no single right answer"):
        load_agent("reasoning-gym:graph_color")
    assert judged("reasoning-gym:graph_color?score=full", "None") == 0.0


def test_questions_follow_the_seed_whatever_else_draws() -> None:
    cls = load_agent("reasoning-gym:list_functions").load()  # one of the few that draw from the global generators
    random.seed(1)
    once = [cls.make_item(seed)["question"] for seed in range(30)]
    random.seed(2)
    again = type("Again", (cls,), {})  # items are kept by class, so this one makes its own, in another order
    assert [again.make_item(seed)["question"] for seed in reversed(range(30))] == once[::-1]


def test_tasks_are_seeds_and_questions_differ() -> None:
    cls = load_agent(f"{SUMS}&num_tasks=3&seed=40").load()
    assert [(task.seed, task.id) for task in cls.tasks()] == [(40, "40"), (41, "41"), (42, "42")]
    assert [task.seed for task in itertools.islice(load_agent(SUMS).load().tasks(), 2)] == [0, 1]
    long = load_agent("reasoning-gym:chain_sum").load()
    assert len({long.make_item(seed)["question"] for seed in range(495, 1010)}) > 510  # over the edges of the data sets


def test_the_question_is_followed_by_what_to_do() -> None:
    assert begin(SUMS)[1].endswith("=\nWrite the final answer in <answer> tags.")
    assert begin(f"{SUMS}&ask=")[1].endswith("=")
    assert begin(f"{SUMS}&ask=Only the number.")[1].endswith("=\nOnly the number.")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 7 ", "7"),
        ("<answer>7</answer>", "7"),
        ("<answer>6</answer> or <answer>\n7 </answer>!", "7"),
        ("<answer>6 <answer>7</answer>", "7"),
        ("<answer>7", "<answer>7"),
        ("", ""),
        ("<answer></answer>7", ""),
    ],
)
def test_where_the_answer_is(text: str, answer: str) -> None:
    assert find_answer(text) == answer


def test_finding_the_answer_in_much_text_takes_no_time() -> None:
    assert find_answer("<answer>" * 200_000 + "7</answer>" + "x" * 200_000) == "7"


@pytest.mark.parametrize(
    ("spec", "problem", "remedy"),
    [
        ("reasoning-gym:chain_sums", "has no 'chain_sums'", "chain_sum"),
        ("reasoning-gym:", "has no ''", "There are"),
        ("reasoning-gym:chain_sum?min_term=2", "unexpected keyword argument 'min_term'", "Options"),
        ("reasoning-gym:chain_sum?min_terms=9&max_terms=2", "max_terms must be >= min_terms", "Options"),
        ("reasoning-gym:chain_sum?score=lax", "score = 'lax'", "exact, full, own"),
        ("reasoning-gym:chain_sum?seed=-1", "seed = -1", "from 0"),
        ("reasoning-gym:chain_sum?size=10", "size", "num_tasks"),
        ("reasoning-gym:chain_sum?num_tasks=many", "num_tasks = 'many'", "from 1"),
    ],
)
def test_a_wrong_specification_is_refused_at_once(spec: str, problem: str, remedy: str) -> None:
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy
