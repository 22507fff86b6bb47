"""What one and the same answer to every question earns, in the data sets of reasoning-gym."""

import contextlib
import time
from collections import Counter

from agentrl import ResetState
from agentrl.core.errors import EnvLoadError
from agentrl.suites.reasoning_gym import ReasoningGymEnv, load_reasoning_gym

QUESTIONS = 200
SECONDS = 2.0  # for the questions of one data set
SHOWN = 14
GUESSES = ("0", "1", "?", "[]")


def constant(name: str) -> tuple[float, str, float, str] | None:
    """The answer that is right most often, and the one that the data set's scorer likes best; `None` if it is too slow to tell."""
    try:
        cls = load_reasoning_gym(f"reasoning-gym:{name}")
    except EnvLoadError:  # without questions of its own, or without one right answer
        return None
    begun, answers = time.monotonic(), []
    while len(answers) < QUESTIONS:
        if time.monotonic() - begun > SECONDS:
            return None
        answers.append(str(cls.make_item(len(answers))["answer"]))
    right, count = Counter(answers).most_common(1)[0]
    marks = {answer: sum(own_marks(cls, seed, answer) for seed in range(QUESTIONS)) / QUESTIONS for answer in {right, *GUESSES}}
    liked = max(marks, key=lambda answer: marks[answer])
    return count / QUESTIONS, right, marks[liked], liked


def own_marks(cls: type[ReasoningGymEnv], seed: int, answer: str) -> float:
    """What a data set's scorer gives; 0 if it cannot read the answer."""
    env = cls()
    env.reset(ResetState(seed=seed))
    try:
        return env.own_marks(answer)
    except (ValueError, TypeError):
        return 0.0


def main() -> None:
    """Print the data sets that a constant answer does best in."""
    from reasoning_gym.factory import DATASETS

    with contextlib.redirect_stdout(None):  # one of them prints dots
        results = {name: result for name in sorted(DATASETS) if (result := constant(name)) is not None}
    for name, (exact, right, own, liked) in sorted(results.items(), key=lambda entry: -max(entry[1][0], entry[1][2]))[:SHOWN]:
        print(f"{name:<22} to the letter {exact:.2f} for {right!r:<14} own scorer {own:.2f} for {liked!r}")
    print(f"{len(results)} of {len(DATASETS)} data sets, {QUESTIONS} questions each")


if __name__ == "__main__":
    main()
