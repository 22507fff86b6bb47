"""Real runs for the page to show, of the bundled model on the real stack, in one process; a run that is there is not made again."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import ENVS, ROOT, start, succeeded, train

HERE = Path(__file__).parent
SMALL = ("--runtime", "local", "--record", "all", "--no-save-model", "--seed", "1")
LIMIT_S = 600


def _train(folder: Path, name: str, agent: Path, *words: str) -> Path:
    if not (folder / name / "summary.json").exists():
        succeeded(train(folder / name, *SMALL, *words, agent=agent.relative_to(ROOT), timeout_s=LIMIT_S))
    return folder / name


def _sizes(steps: int, groups: int, tokens: int) -> tuple[str, ...]:
    return ("--num-steps", str(steps), "--groups-per-step", str(groups), "--n-samples-per-prompt", "4", "--max-new-tokens", str(tokens))


def calculator(folder: Path, *, steps: int = 6, name: str = "calculator", rate: str = "3e-4") -> Path:
    """Two turns and a tool, asynchronous, with an evaluation before, between and at the end."""
    every = ("--eval-every", str(max(1, steps // 2)), "--eval-size", "12", "--eval-at-start")
    rest = ("--async", "--learning-rate", rate, "--flat-groups", "resample")
    return _train(folder, name, ENVS / "calculator.py", *_sizes(steps, 8, 32), *every, *rest)


def tuned(folder: Path, *, steps: int = 8) -> None:
    """Runs of the commands for given data: a chat, pairs of answers, and answers whose steps are judged."""
    sizes = ("--num-steps", str(steps), "--batch-size", "8", "--eval-size", "8", "--eval-every", str(max(1, steps // 4)))
    for method, data in (("sft", "chats"), ("dpo", "pairs"), ("process-reward-model", "steps")):
        if not (folder / method / "summary.json").exists():
            rows = f"examples/tune/{data}.jsonl"  # as a reader would name it, from the repository's folder
            process = start(method, "--data", rows, *sizes, "--run-dir", str(folder / method))
            output, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output


def negotiation(folder: Path) -> Path:
    """Two agents in one episode."""
    return _train(folder, "negotiation", ENVS / "negotiation.py", *_sizes(2, 4, 8))


def branching(folder: Path) -> Path:
    """A black-box agent whose episodes have branches; only those of the last answer are trained."""
    return _train(folder, "branching", HERE / "branching.py", *_sizes(2, 4, 16), "--train-branches", "final")


def tools(folder: Path) -> Path:
    """Tools that are functions, with their times."""
    return _train(folder, "tools", HERE / "tools.py", *_sizes(2, 8, 32), "--max-turns", "3")


def unreachable(folder: Path, *, steps: int = 6) -> Path:
    """A run that does not learn, because no answer ever gets a reward."""
    return _train(folder, "sums", HERE / "sums.py", *_sizes(steps, 8, 16))


def masked(folder: Path, *, steps: int = 6) -> Path:
    """A run that does not learn, because the off-policy correction masks every token."""
    wrong = ("--async", "--off-policy", "icepop", "--off-policy-range", "1.5", "2.0")
    return _train(folder, "masked", ENVS / "calculator.py", *_sizes(steps, 4, 16), *wrong)
