"""Repair a small repository with a shell and an editor; hidden tests decide.

It teaches an agent that works on files, and a reward that it cannot reach. A script makes each repository from a seed: a
module with one bug, a description and tests of which one or two fail. The agent has the tools `bash` and `edit` in a
sandbox. When it answers without a call, its processes are ended. The module alone is copied to a second, clean sandbox,
which gets the inputs of the hidden tests and prints what the functions return. The expected values stay with the trainer,
so nothing that the agent leaves behind can read or forge them. Every hidden test has to pass for the reward of 1. Tasks
never end, and those of the evaluation have other seeds. The sandbox needs bubblewrap, podman or docker; with
`--sandbox none` programs are only limited, and can read other files of this machine. The task suits a pretrained model;
the recipe ``examples/recipes/cpu/swe.toml`` lets the bundled one imitate a script first. Run it with::

    agentrl train --agent envs/swe.py --async --model Qwen/Qwen3-1.7B --max-turns 12

    user       In this repository the tests of prices.py fail. Repair prices.py; leave its functions' names as they are. ...
    assistant  <tool_call>{"name": "bash", "arguments": {"command": "cat prices.py; python3 tests.py"}}</tool_call>
    tool       ... total([12, 40]) returned 12, not 52
    assistant  <tool_call>{"name": "edit", "arguments": {"path": "prices.py", "old": "prices[:-1]", "new": "prices"}}</tool_call>
    tool       prices.py is changed.
    assistant  The last price was left out; now it counts.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from agentrl import ResetResult, ResetState, Sandbox, SandboxSpec, StepResult, StepState, Task, ToolEnv

NUM_SHOWN, NUM_HIDDEN = 4, 12
NUM_EVAL = 60
FIRST_EVAL_SEED = 10**9
COMMAND_S, TESTS_S = 10.0, 10.0
MAX_MODULE = 64 * 1024
SPEC = SandboxSpec(memory_mib=512, disk_mib=64, processes=32)
PROMPT = (
    "In this repository the tests of {module} fail. Repair {module}; leave its functions' names as they are. "
    "README.md says what they do, and tests.py shows failing tests. When it is repaired, answer in a sentence."
)

Make = Callable[[Random], list[Any]]


def numbers(rng: Random) -> list[int]:
    """Three to nine whole numbers, some of them twice."""
    return [rng.randint(-20, 60) for _ in range(rng.randint(3, 9))]


def words(rng: Random) -> str:
    """Two to six short words of few letters, so that some come again."""
    return " ".join("".join(rng.choices("abcd", k=rng.randint(1, 3))) for _ in range(rng.randint(2, 6)))


@dataclass(frozen=True)
class Template:
    """A module whose constants a seed chooses, and its possible bugs.

    Attributes:
        source: The right module; ``{a}`` and ``{b}`` are constants.
        calls: Function -> maker of its arguments.
        bugs: Right text and the wrong text in its place.
        text: What README.md says of it.
    """

    name: str
    text: str
    source: str
    calls: dict[str, Make]
    bugs: tuple[tuple[str, str], ...]


TEMPLATES = (
    Template(
        "prices.py",
        "total(prices): the sum of positive prices, less {a} percent (rounded down) from {b} on.\n"
        "cheapest(prices): the smallest positive price, 0 if there is none.",
        "def positive(prices):\n    return [price for price in prices if price > 0]\n\n\n"
        "def total(prices):\n    whole = sum(positive(prices))\n    return whole - whole * {a} // 100 if whole >= {b} else whole\n\n\n"
        "def cheapest(prices):\n    return min(positive(prices), default=0)\n",
        {"total": lambda rng: [numbers(rng)], "cheapest": lambda rng: [numbers(rng) if rng.random() < 0.7 else [-3, 0, -8]]},
        (
            ("price > 0", "price > {a}"),
            ("whole >= {b}", "whole > {b} + {a}"),
            ("return whole - whole * {a}", "return whole + whole * {a}"),
            ("sum(positive(prices))", "sum(positive(prices)[:-1])"),
            ("min(positive(prices), default=0)", "min(prices, default=0)"),
        ),
    ),
    Template(
        "texts.py",
        "shorten(text): the first {a} words, and `...` behind them if there are more.\n"
        "count(text): each word and how often it comes, as a dictionary.\nwidest(text): the first of the longest words.",
        "def shorten(text):\n    found = text.split()\n    return ' '.join(found[:{a}]) + (' ...' if len(found) > {a} else '')\n\n\n"
        "def count(text):\n    counts = {{}}\n    for word in text.split():\n        counts[word] = counts.get(word, 0) + 1\n"
        "    return counts\n\n\n"
        "def widest(text):\n    return max(text.split(), key=len)\n",
        {name: lambda rng: [words(rng)] for name in ("shorten", "count", "widest")},
        (
            ("found[:{a}]", "found[:{a} - 1]"),
            ("len(found) > {a}", "len(found) >= {a}"),
            ("counts.get(word, 0) + 1", "1"),
            ("key=len", "key=str"),
            ("text.split():", "text.split()[1:]:"),
        ),
    ),
    Template(
        "windows.py",
        "means(values): the mean, rounded down, of every {a} neighbours.\n"
        "rises(values): how often a value is larger than the one before it.\n"
        "clip(values): every value, but at most {b} and at least 0.",
        "def means(values):\n    return [sum(values[i : i + {a}]) // {a} for i in range(len(values) - {a} + 1)]\n\n\n"
        "def rises(values):\n    return sum(after > before for before, after in zip(values, values[1:]))\n\n\n"
        "def clip(values):\n    return [min(max(value, 0), {b}) for value in values]\n",
        {name: lambda rng: [numbers(rng)] for name in ("means", "rises", "clip")},
        (
            ("- {a} + 1)", "- {a})"),
            ("i : i + {a}]", "i : i + {a} - 1]"),
            ("after > before", "after < before"),
            ("values[1:]", "values[2:]"),
            ("max(value, 0)", "abs(value)"),
        ),
    ),
    Template(
        "stock.py",
        "apply(changes): a list of [item, change]; the number of each item at the end, from 0 at the beginning; a change that\n"
        "would make it negative or larger than {b} is left out.\nlow(changes): names, sorted, of items of which at most {a} are left.",
        "def apply(changes):\n    stock = {{}}\n    for item, change in changes:\n        after = stock.get(item, 0) + change\n"
        "        if 0 <= after <= {b}:\n            stock[item] = after\n    return stock\n\n\n"
        "def low(changes):\n    return sorted(item for item, number in apply(changes).items() if number <= {a})\n",
        {name: lambda rng: [[[rng.choice("pqr"), rng.randint(-12, 18)] for _ in range(rng.randint(3, 9))]] for name in ("apply", "low")},
        (
            ("0 <= after <= {b}", "after <= {b}"),
            ("0 <= after <= {b}", "0 <= change <= {b}"),
            ("stock[item] = after", "stock[item] = change"),
            ("number <= {a}", "number < {a} - 1"),
            ("return sorted(item", "return list(item"),
        ),
    ),
)

RUNNER = """
import json, sys
tests = json.load(sys.stdin)
space = {"__name__": "module"}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), space)
results = []
for name, arguments in tests:
    try:
        results.append([True, space[name](*arguments)])
    except Exception as error:
        results.append([False, f"{type(error).__name__}: {error}"])
print("\\n" + json.dumps(results, default=str))
"""

SHOWN = """import {name}

for call, wanted in {tests}:
    try:
        seen = repr(eval(call, vars({name})))
    except Exception as error:
        seen = f"an error, {{error!r}}"
    print("ok" if seen == wanted else f"FAILED: {{call}} returned {{seen}}, not {{wanted}}")
"""


@dataclass(frozen=True)
class Repository:
    """A repository that a seed makes: the module right and wrong, the files that the agent sees, and the hidden tests with their values."""

    module: str
    right: str
    wrong: str
    files: dict[str, str]
    tests: list[tuple[str, list[Any]]]
    expected: list[Any]

    @property
    def repair(self) -> tuple[str, str]:
        """The wrong part of the one wrong line, with its neighbours as far as needed for it to occur once, and the right part."""
        lines = zip(self.wrong.splitlines(), self.right.splitlines(), strict=True)
        wrong, right = next((before, after) for before, after in lines if before != after)
        begin = shared(wrong, right)
        end = min(shared(wrong[::-1], right[::-1]), len(wrong) - begin, len(right) - begin)
        while self.wrong.count(wrong[begin : len(wrong) - end]) != 1:
            begin, end = max(0, begin - 1), max(0, end - 1)
        return wrong[begin : len(wrong) - end], right[begin : len(right) - end]


def shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def make_repository(seed: int) -> Repository:
    """Return the repository of a seed; its bug shows in the tests that the agent sees and in the hidden ones."""
    for attempt in itertools.count():
        rng = Random(f"{seed} {attempt}")
        template = rng.choice(TEMPLATES)
        constants = {"a": rng.randint(2, 4), "b": rng.randint(9, 40)}
        before, after = (text.format(**constants) for text in rng.choice(template.bugs))
        right = template.source.format(**constants)
        wrong = right.replace(before, after, 1)
        tests = [(name, template.calls[name](rng)) for name in rng.choices(list(template.calls), k=NUM_SHOWN + NUM_HIDDEN)]
        expected = run_here(right, tests)
        differs = [one != other for one, other in zip(expected, run_here(wrong, tests), strict=True)]
        if any(differs[:NUM_SHOWN]) and any(differs[NUM_SHOWN:]):
            break
    name = template.name.removesuffix(".py")
    shown = [(f"{call}({', '.join(map(repr, given))})", repr(value)) for (call, given), value in zip(tests, expected, strict=True)][
        :NUM_SHOWN
    ]
    files = {
        template.name: wrong,
        "README.md": f"# {template.name}\n\n{template.text.format(**constants)}\n",
        "tests.py": SHOWN.format(name=name, tests=json.dumps(shown, indent=4)),
    }
    return Repository(template.name, right, wrong, files, tests[NUM_SHOWN:], expected[NUM_SHOWN:])


def run_here(source: str, tests: Sequence[tuple[str, list[Any]]]) -> list[Any]:
    """Return what a module of this file returns; never used for code of a model."""
    space: dict[str, Any] = {}
    exec(source, space)
    return [space[name](*json.loads(json.dumps(given))) for name, given in tests]


async def passed(repository: Repository, module: str) -> int:
    """Return how many hidden tests a module passes, in a new sandbox that holds nothing else.

    Raises:
        SandboxError: If the sandbox does not start.
    """
    async with Sandbox(SPEC) as sandbox:
        await sandbox.write(repository.module, module)
        await sandbox.write("run_tests.py", RUNNER)
        stdin = json.dumps(repository.tests).encode()
        done = await sandbox.exec(sandbox.python, "run_tests.py", repository.module, timeout_s=TESTS_S, stdin=stdin, keep="last")
    try:
        results = json.loads(done.output.strip().rpartition("\n")[2])
    except (ValueError, RecursionError):
        return 0
    if not isinstance(results, list) or len(results) != len(repository.tests):
        return 0
    wanted = [json.dumps([True, value], sort_keys=True) for value in repository.expected]
    return sum(json.dumps(result, sort_keys=True) == value for result, value in zip(results, wanted, strict=True))


class Swe(ToolEnv):
    """A repository with a bug, two tools, and a reward by hidden tests."""

    prompt: ClassVar[str] = PROMPT
    tool_timeout_s = COMMAND_S + 20.0
    on_tool_failure = "raise"

    @classmethod
    def tasks(cls) -> Iterator[Task]:
        """Endless repositories, by their seeds."""
        return map(cls._task, range(FIRST_EVAL_SEED))

    @classmethod
    def eval_tasks(cls) -> Iterable[Task]:
        """Repositories of other seeds."""
        return [cls._task(FIRST_EVAL_SEED + number) for number in range(NUM_EVAL)]

    @classmethod
    def _task(cls, seed: int) -> Task:
        return Task(cls.prompt.format(module=make_repository(seed).module), id=f"swe-{seed}", seed=seed)

    @classmethod
    async def try_solution(cls, task: Task, *, solved: bool) -> float:
        """Return the reward of the right module, or of the repository as the agent finds it."""
        repository = make_repository(int(task.seed or 0))
        source = repository.right if solved else repository.wrong
        return float(await passed(repository, source) == len(repository.tests))

    async def reset(self, state: ResetState) -> ResetResult:
        """Open the agent's sandbox with the repository, and offer the tools."""
        self._repository, self._stack = make_repository(int(state.task.seed or 0)), AsyncExitStack()
        self._sandbox = await self._stack.enter_async_context(Sandbox(SPEC))
        for name, text in self._repository.files.items():
            await self._sandbox.write(name, text)
        offered = super().reset(state)
        return offered if isinstance(offered, ResetResult) else await offered

    def list_tools(self) -> Sequence[Callable[..., Any]]:
        """Return the shell and the editor of this episode."""
        return (self.bash, self.edit)

    async def bash(self, command: str) -> str:
        """Run a command in the repository, and return what it prints.

        Args:
            command: The command, for sh. Files stay from one command to the next; variables and processes do not.
        """
        done = await self._sandbox.exec("sh", "-c", command, timeout_s=COMMAND_S)
        ended = f"exit code {done.code}" if done.ended == "exit" else f"stopped: {done.ended}"
        return done.output if done.ended == "exit" and not done.code else f"{done.output}\n[{ended}]"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file.

        Args:
            path: File of the repository, as README.md.
            old: The text to replace, with its line breaks and indents.
            new: The text in its place.
        """
        if path not in self._repository.files:
            return f"Error: {path!r} is no file of the repository; it has {', '.join(self._repository.files)}."
        text = await self._content(path)
        if text is None:
            return f"Error: {path} cannot be read."
        if text.count(old) != 1:
            return f"Error: the text occurs {text.count(old)} times in {path}; it has to occur once."
        done = await self._sandbox.exec("sh", "-c", 'cat > "$1"', "sh", path, timeout_s=COMMAND_S, stdin=text.replace(old, new).encode())
        return f"{path} is changed." if done.ended == "exit" and done.code == 0 else f"Error: {path} cannot be written."

    async def _content(self, name: str) -> str | None:
        """The text of a file, `None` if there is none; a program reads it, so that whatever the agent put there is no failure of ours."""
        done = await self._sandbox.exec("cat", name, timeout_s=COMMAND_S, output=MAX_MODULE)
        return done.output if done.ended == "exit" and done.code == 0 else None

    async def judge(self, state: StepState) -> StepResult:
        """End the agent's sandbox, and run the hidden tests on its module in another."""
        module = await self._content(self._repository.module)
        await self._stack.aclose()
        count = 0 if module is None else await passed(self._repository, module)
        right = float(count == len(self._repository.tests))
        return StepResult(right, terminated=True, score=right, info={"passed": count / len(self._repository.tests)})

    def solve(self, state: StepState) -> str:
        """Read the module, repair it and say so, for `agentrl check` and for demonstrations."""
        made = self._repository
        if state.turn == 0:
            return call("bash", f"cat {made.module}")
        return call("edit", made.module, *made.repair) if state.turn == 1 else f"{made.module} is repaired."

    async def close(self) -> None:
        """End the sandbox, whatever happened."""
        if hasattr(self, "_stack"):
            await self._stack.aclose()
        await super().close()


def call(tool: str, *arguments: str) -> str:
    """Return a call with arguments in their order."""
    return json.dumps({"tool": tool, "args": arguments}, separators=(",", ":"))
