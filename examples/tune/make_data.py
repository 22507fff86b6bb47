"""Writes the small data sets of this folder, on which the tests and the pages of docs/tune train the bundled model.

    python examples/tune/make_data.py [FOLDER]

The questions are those of ``envs/arithmetic.py``, which the bundled model answers correctly about half of the time. The same seed gives the
same files.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SEED = 7


def questions() -> list[tuple[str, int]]:
    """All questions about two digits, with their answers."""
    digits = range(10)
    sums = [(f"What is {a}+{b}?", a + b) for a in digits for b in digits]
    return sums + [(f"What is {a}-{b}?", a - b) for a in digits for b in digits if a >= b]


def wrong(answer: int, rng: random.Random) -> int:
    """Another number near the answer."""
    return rng.choice([number for number in range(max(0, answer - 4), answer + 5) if number != answer])


def chats(rng: random.Random) -> Iterator[dict[str, object]]:
    """Two questions in a row, each with its right answer, and how useful the chat is."""
    for _ in range(320):
        messages = []
        for question, answer in rng.sample(questions(), 2):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]
        yield {"messages": messages}


def rated(rng: random.Random) -> Iterator[dict[str, object]]:
    """A question and an answer, right or wrong, with its quality: 1 or 0."""
    for _ in range(320):
        question, answer = rng.choice(questions())
        good = rng.random() < 0.5
        yield {"prompt": question, "completion": str(answer if good else wrong(answer, rng)), "quality": int(good)}


def texts(rng: random.Random) -> Iterator[dict[str, object]]:
    """Plain text: a few sums in a row."""
    for _ in range(200):
        yield {"text": " ".join(f"{question[8:-1]}={answer}." for question, answer in rng.sample(questions(), 4))}


def pairs(rng: random.Random) -> Iterator[dict[str, object]]:
    """A question, its right answer and a wrong one, and how far apart the two are."""
    for _ in range(320):
        question, answer = rng.choice(questions())
        other = wrong(answer, rng)
        yield {"prompt": question, "chosen": str(answer), "rejected": str(other), "margin": abs(answer - other) / 4}


def labelled(rng: random.Random) -> Iterator[dict[str, object]]:
    """A question and an answer, desirable if it is right."""
    for _ in range(320):
        question, answer = rng.choice(questions())
        good = rng.random() < 0.5
        yield {"prompt": question, "completion": str(answer if good else wrong(answer, rng)), "label": good}


def helpful(rng: random.Random) -> Iterator[dict[str, object]]:
    """A question, its right answer and one that does not answer, and how far apart the two are."""
    for _ in range(320):
        question, answer = rng.choice(questions())
        other, margin = rng.choice([("no", 1.0), ("wait", 1.0), (question, 0.5), (f"{answer} {answer} {answer}", 0.25)])
        yield {"prompt": question, "chosen": str(answer), "rejected": other, "margin": margin}


def steps(rng: random.Random) -> Iterator[dict[str, object]]:
    """Four digits, one a step; a step is good if its digit is odd."""
    for _ in range(320):
        digits = [rng.randint(0, 9) for _ in range(4)]
        yield {
            "prompt": "Name odd digits.",
            "completions": [str(digit) for digit in digits],
            "labels": [digit % 2 == 1 for digit in digits],
        }


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """Write all files."""
    for make in (chats, rated, texts, pairs, helpful, labelled, steps):
        write(folder / f"{make.__name__}.jsonl", make(random.Random(f"{SEED}-{make.__name__}")))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
