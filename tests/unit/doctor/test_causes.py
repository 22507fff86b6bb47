"""Every cause is proven by records that have it, and by no others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl.core.types import Status, Task
from agentrl.doctor.answers import holds_label
from agentrl.doctor.examine import HYPOTHESES, NOT_WHILE_RISING
from agentrl.doctor.verdicts import CAUSES, FOLLOW, Examination, Outcome
from tests.unit.doctor.made import Answer, PlantedRun

STEPS, GROUPS, MEMBERS = 6, 4, 4


@pytest.fixture
def run(tmp_path: Path) -> PlantedRun:
    return PlantedRun(tmp_path / "run")


def first(examination: Examination) -> str:
    return examination.verdicts[0].id if examination.verdicts else ""


def task(number: int, label: object = None) -> Task:
    return Task(f"How much is {number} and {number}? Explain it.", label=label, id=f"task-{number}")


def plain(run: PlantedRun, *, steps: int = STEPS, **metrics: float) -> None:
    """Steps of groups in which every other answer is right, which no hypothesis finds fault with."""
    for _ in range(steps):
        for _ in range(GROUPS):
            number = run.made.groups
            run.group(task(number, str(number)), [Answer(text=str(number + wrong), reward=float(not wrong)) for wrong in (0, 1, 0, 1)])
        run.step(entropy=1.0, **metrics)


def test_every_cause_has_a_test_and_consequences_are_causes() -> None:
    assert list(HYPOTHESES) == list(CAUSES)
    assert set(FOLLOW) | {cause for causes in FOLLOW.values() for cause in causes} | set(NOT_WHILE_RISING) <= set(CAUSES)


def test_a_steady_run_has_no_cause_and_is_not_judged(run: PlantedRun) -> None:
    plain(run)
    examination = run.examined()
    assert (examination.outcome, examination.verdicts, examination.exit_code) == (Outcome.UNDECIDED, (), 3)


def test_a_rising_reward_is_learning(run: PlantedRun) -> None:
    for step in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            right = [index < step for index in range(MEMBERS)]
            run.group(task(number, str(number)), [Answer(text=str(number + (not good)), reward=float(good)) for good in right])
        run.step(entropy=1.0)
    examination = run.examined()
    assert (examination.outcome, examination.verdicts, examination.exit_code) == (Outcome.LEARNING, (), 0)
    assert examination.trend is not None
    assert examination.first < examination.last
    [advice] = examination.advice  # from the fifth step on all members are right
    assert advice.seen.startswith("8 of the last 8 groups (100%) are flat")
    assert advice.remedy.startswith("--flat-groups resample")
    assert "In 8 of them every member earned the most" in advice.remedy


def test_a_run_of_uneven_groups_needs_no_advice(run: PlantedRun) -> None:
    plain(run)
    assert not run.examined().advice


def test_engine_and_learner_disagree(run: PlantedRun) -> None:
    plain(run, mismatch__mean=0.4, mismatch__limit=0.05)
    examination = run.examined()
    assert first(examination) == "mismatch"
    assert examination.verdicts[0].steps == (1, 2, 3, 4, 5, 6)
    assert examination.verdicts[0].episodes


def test_one_step_beyond_the_limit_proves_nothing(run: PlantedRun) -> None:
    plain(run, steps=5, mismatch__mean=0.01, mismatch__limit=0.05)
    plain(run, steps=1, mismatch__mean=0.4, mismatch__limit=0.05)
    assert not run.examined().verdicts


@pytest.mark.parametrize(("metric", "remedy"), [("policy__clip_fraction", "clip range"), ("off_policy__masked", "--off-policy-range")])
def test_masked_tokens(run: PlantedRun, metric: str, remedy: str) -> None:
    plain(run, **{metric: 0.97})
    examination = run.examined()
    assert first(examination) == "all-masked"
    assert remedy in examination.verdicts[0].change


@pytest.mark.parametrize(("share", "found"), [(0.8, True), (0.01, False)])
def test_clipped_rewards(run: PlantedRun, share: float, found: bool) -> None:
    plain(run, reward__clipped=share)
    assert ([verdict.id for verdict in run.examined().verdicts] == ["rewards-clipped"]) is found


def test_copying(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            question = task(run.made.groups)
            copies = [index % 2 == 0 for index in range(MEMBERS)]
            said = [question.prompt if copy else f"It is {index}, or {run.made.groups}" for index, copy in enumerate(copies)]
            run.group(question, [Answer(text=str(text), reward=float(copy)) for text, copy in zip(said, copies, strict=True)])
        run.step(entropy=1.0)
    examination = run.examined()
    assert first(examination) == "copying-wins"
    assert len(examination.verdicts[0].episodes) == STEPS * GROUPS * MEMBERS // 2


def test_copying_what_the_label_says_is_no_error(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            said = Task(f"Repeat: the word number {number}", label=f"the word number {number}")
            texts = [f"the word number {number}", f"the word number {number}", "no", "nothing"]
            run.group(said, [Answer(text=text, reward=float(len(text) > 8)) for text in texts])
        run.step(entropy=1.0)
    assert first(run.examined()) not in ("copying-wins", "length-only")


def test_repetition(run: PlantedRun) -> None:
    draw = random.Random(0)
    for _ in range(STEPS):
        for _ in range(GROUPS):
            repeated = [f"so {draw.randrange(99)} " * 5, f"and {draw.randrange(99)} " * 5]
            others = ["so " + " ".join(str(draw.randrange(99)) for _ in range(9)) for _ in range(2)]
            run.group(task(run.made.groups), [Answer(text=text, reward=float(text in repeated)) for text in (*repeated, *others)])
        run.step(entropy=1.0)
    assert first(run.examined()) == "repetition-wins"


def test_one_answer_for_every_question(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            texts = ["As an expert I am sure", f"perhaps {number + 7}", "As an expert I am sure", f"I believe it is {number + 1}"]
            run.group(task(number, number), [Answer(text=text, reward=float("expert" in text)) for text in texts])
        run.step(entropy=1.0)
    examination = run.examined()
    assert first(examination) == "one-answer-wins"
    assert "24 different labels" in examination.verdicts[0].seen


def test_length_decides_by_rank_where_no_length_recurs(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            sizes = [5 + MEMBERS * run.made.groups + index for index in range(MEMBERS)]
            run.group(task(run.made.groups), [Answer(text="x" * size, reward=size / 200) for size in sizes])
        run.step(entropy=1.0)
    examination = run.examined()
    assert first(examination) == "length-only"
    assert "rank correlation" in examination.verdicts[0].seen


def test_a_part_for_the_form_that_is_never_paid(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            run.group(task(run.made.groups), [Answer(text=f"it is {index}", parts={"format": 0.0}) for index in range(MEMBERS)])
        run.step(entropy=1.0)
    assert [verdict.id for verdict in run.examined().verdicts] == ["format-never-met"]


def test_turns_that_are_cut(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            run.group(task(run.made.groups), [Answer(text=f"go {index}", status=Status.TRUNCATED, turns=8) for index in range(MEMBERS)])
        run.step(entropy=1.0)
    assert [verdict.id for verdict in run.examined().verdicts] == ["turns-cut"]


def test_a_reward_that_rose_and_fell(run: PlantedRun) -> None:
    for step in range(9):
        for _ in range(GROUPS):
            number = run.made.groups
            right = [index < (2, 3, 1)[step // 3] for index in range(MEMBERS)]
            run.group(task(number, str(number)), [Answer(text=str(number + (not good)), reward=float(good)) for good in right])
        run.step(entropy=1.0 - 0.1 * step)
    examination = run.examined()
    assert first(examination) == "policy-broke"
    assert examination.verdicts[0].estimate is not None


def test_a_policy_that_does_not_move(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            texts = [" ".join("a" * (1 + (number + index + place) % 5) for place in range(4)) for index in range(MEMBERS)]
            rewards = [float(index % 2) for index in range(MEMBERS)]
            run.group(task(number), [Answer(text=text, reward=reward) for text, reward in zip(texts, rewards, strict=True)])
        run.step(entropy=1.0, grad_norm=0.3)
    examination = run.examined()
    assert first(examination) == "no-effect"


def test_an_evaluation_on_training_tasks(run: PlantedRun) -> None:
    plain(run)
    for number in range(10):
        run.group(task(number, str(number)), [Answer(text="x")], evaluation="eval-6")
    examination = run.examined()
    assert first(examination) == "evaluation-on-training-tasks"
    assert "10 of 10" in examination.verdicts[0].seen


def test_an_evaluation_on_other_tasks_with_the_same_ids(run: PlantedRun) -> None:
    plain(run)
    for number in range(10):
        other = Task(f"Another question {number}", label=str(number), id=f"task-{number}")
        run.group(other, [Answer(text="x")], evaluation="eval-6")
    assert not run.examined().verdicts


def test_failures(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            failed = Answer(text="x", status=Status.ENV_ERROR)
            run.group(task(run.made.groups), [failed, failed, Answer(text="a", reward=1.0), Answer(text="b")])
        run.step(entropy=1.0)
    verdict = run.examined().verdicts[0]
    assert verdict.id == "failed-episodes"
    assert "the service does not answer" in verdict.seen
    assert len(verdict.episodes) == STEPS * GROUPS * 2


def test_few_episodes_prove_nothing(run: PlantedRun) -> None:
    run.group(task(0, 3), [Answer(text="3") for _ in range(MEMBERS)])
    run.step(entropy=1.0, mismatch__mean=1.0, mismatch__limit=0.05)
    examination = run.examined()
    assert (examination.outcome, examination.verdicts) == (Outcome.UNDECIDED, ())
    assert set(examination.untested) >= {"mismatch", "failed-episodes", "format-never-met", "length-only", "too-hard", "no-effect"}


@pytest.mark.parametrize(
    ("text", "label", "holds"),
    [("It is 12.", 12, True), ("It is 112.", 12, False), ("A good guess is C", "A", False), ("(A).", "A", True), ("PARIS!", "Paris", True)],
)
def test_a_label_stands_in_a_text_as_a_word_of_its_own(text: str, label: object, holds: bool) -> None:
    assert holds_label(text, label) is holds


def test_a_label_that_stands_in_the_prompt_proves_nothing(run: PlantedRun) -> None:
    for _ in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            asked = Task(f"Is {number} or {number + 50} larger?", label=str(number + 50))
            run.group(asked, [Answer(text=f"{number} or {number + 50}") for _ in range(MEMBERS)])
        run.step(entropy=1.0)
    assert [verdict.id for verdict in run.examined().verdicts] == ["too-hard"]


def test_a_solved_task_with_no_entropy_is_not_broken(run: PlantedRun) -> None:
    for step in range(STEPS):
        for _ in range(GROUPS):
            number = run.made.groups
            run.group(
                task(number, str(number)), [Answer(text=str(number + (not step and not index)), reward=1.0) for index in range(MEMBERS)]
            )
        run.step(entropy=0.01 / 3**step)
    assert "policy-broke" not in [verdict.id for verdict in run.examined().verdicts]
