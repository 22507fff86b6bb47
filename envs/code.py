"""Write a Python function; hidden tests run it in a sandbox.

The example shows how to run a model's code, and a reward that the code cannot reach. The code runs in a sandbox
(`run_python`), which receives the inputs of the tests and prints the returned values; the expected values and the
reference solutions never enter it. The code sees neither this file, nor other processes, nor the network, and nothing
that it starts outlives it. With `--sandbox none` it is only limited, and can read this file. Wrong code is a reward
of 0; a sandbox that does not start is an error, which is not trained on. The sandbox needs bubblewrap
(`apt-get install bubblewrap`), or with `--sandbox container` podman or docker; the task suits a pretrained model.
Run it with::

    agentrl train --agent envs/code.py --async --model Qwen/Qwen3-0.6B --max-new-tokens 256

    user       Write a Python function clamp(x, low, high): x, but at least low and at most high.
    assistant  def clamp(x, low, high): return max(x, low)
    user       It fails: clamp(9, 1, 5) returned 9. Write it again.
    assistant  def clamp(x, low, high): return min(max(x, low), high)
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from agentrl import AgentInstance, StepResult, StepState, Task, run_python

SECOND_TRY = 0.5
NUM_TESTS = 12

Inputs = Callable[[Random], list[Any]]


def numbers(rng: Random) -> list[Any]:
    """A list of one to eight whole numbers."""
    return [[rng.randint(-9, 9) for _ in range(rng.randint(1, 8))]]


def words(rng: Random) -> list[Any]:
    """A text of one to five words of few letters, so that letters and words come again."""
    return [" ".join("".join(rng.choices("abe", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5)))]


PROBLEMS: dict[str, tuple[str, Callable[..., Any], Inputs]] = {
    "add(a, b)": ("the sum of two numbers", lambda a, b: a + b, lambda rng: [rng.randint(-99, 99), rng.randint(-99, 99)]),
    "clamp(x, low, high)": (
        "x, but at least low and at most high",
        lambda x, low, high: min(max(x, low), high),
        lambda rng: [rng.randint(-9, 19), rng.randint(-5, 2), rng.randint(3, 9)],
    ),
    "largest(values)": ("the largest of a list of numbers", max, numbers),
    "evens(values)": ("the even ones of a list of numbers", lambda values: [v for v in values if v % 2 == 0], numbers),
    "unique(values)": ("a list without repetitions, in order of first appearance", lambda v: list(dict.fromkeys(v)), numbers),
    "backwards(text)": ("the text backwards", lambda text: text[::-1], words),
    "swap_words(text)": ("the words of the text in reverse order", lambda text: " ".join(text.split()[::-1]), words),
    "longest_word(text)": ("the first of the longest words", lambda text: max(text.split(), key=len), words),
    "palindrome(text)": (
        "whether the text reads the same backwards",
        lambda t: t == t[::-1],
        lambda rng: ["".join(rng.choices("ab", k=3))],
    ),
    "letters(text)": (
        "a dictionary: each letter, spaces left out, and how often it comes",
        lambda t: dict(Counter(t.replace(" ", ""))),
        words,
    ),
    "divisors(n)": (
        "all positive divisors of n, smallest first",
        lambda n: [d for d in range(1, n + 1) if n % d == 0],
        lambda rng: [rng.randint(1, 60)],
    ),
    "running_total(values)": (
        "a list of the sums of the first 1, 2, 3, ... numbers",
        lambda v: [sum(v[: i + 1]) for i in range(len(v))],
        numbers,
    ),
}

PROGRAM = """
import json
code, name, tests = json.loads({payload!r})
print("started", flush=True)
space = {{"__name__": "answer"}}
exec(compile(code, "<answer>", "exec"), space)
results = []
for test in tests:
    try:
        results.append({{"value": space[name](*test)}})
    except Exception as error:
        results.append({{"error": f"{{type(error).__name__}}: {{error}}"}})
print("\\n" + json.dumps(results, default=str))
"""


class Code(AgentInstance):
    """Two attempts at a function; the second, after a failing test is shown, earns half the reward."""

    @classmethod
    def tasks(cls) -> Iterable[Task]:
        """Twelve functions, each with ten sets of tests; the label is the function's head."""
        return [
            Task(
                f"Write a Python function {head}: {what}. Write nothing else.", label=head, id=f"{head.partition('(')[0]}-{seed}", seed=seed
            )
            for head, (what, _, _) in PROBLEMS.items()
            for seed in range(10)
        ]

    async def step(self, state: StepState) -> StepResult:
        """Run the tests."""
        _, solution, inputs = PROBLEMS[state.label]
        rng = Random(f"{state.label} {state.task.seed}")
        tests = [inputs(rng) for _ in range(NUM_TESTS)]
        problem, passed = await run_tests(
            extract(state.action_text), state.label.partition("(")[0], tests, [solution(*test) for test in tests]
        )
        info = {"passed": passed / NUM_TESTS}
        if problem is None:
            return StepResult(1.0 if state.turn == 0 else SECOND_TRY, terminated=True, score=1.0, info=info)
        return StepResult(0.0, f"It fails: {problem}. Write it again.", terminated=state.turn > 0, score=0.0, info=info)


def extract(text: str) -> str:
    """Return the code in an answer: the last fenced block, else the whole text."""
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else text


async def run_tests(code: str, name: str, tests: list[list[Any]], expected: list[Any]) -> tuple[str | None, int]:
    """Return the first problem of the code, `None` if there is none, and the number of tests that pass.

    Raises:
        RuntimeError: If the sandbox ended before it ran the code.
    """
    output = await run_python(PROGRAM.format(payload=json.dumps([code, name, tests])))
    if not output.startswith("started"):
        raise RuntimeError(f"the sandbox for tests does not work: {output[-300:]}")
    last = output.rpartition("\n")[2]
    results = parse_results(last, len(tests))
    if results is None:
        return last[:200] or "it printed no result", 0
    right = [same(result, value) for result, value in zip(results, expected, strict=True)]
    if all(right):
        return None, len(tests)
    first = right.index(False)
    result = results[first]
    what = f"raised {result['error']}" if "error" in result else f"returned {result.get('value')!r}"
    return f"{name}({', '.join(map(repr, tests[first]))}) {what}"[:300], sum(right)


def parse_results(line: str, count: int) -> list[dict[str, Any]] | None:
    """Return the results in the last line of output, `None` if the line holds none."""
    try:
        results = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(results, list) and len(results) == count and all(isinstance(result, dict) for result in results)
    return results if good else None


def same(result: dict[str, Any], expected: Any) -> bool:
    """Return True if a test returned the expected value with the same types (1 is not True)."""
    return "value" in result and json.dumps(result["value"], sort_keys=True) == json.dumps(expected, sort_keys=True)
