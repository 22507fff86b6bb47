"""``agentrl play`` in a terminal, through a pipe, and with a model."""

from __future__ import annotations

import io
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.e2e.runs import ENVS, ROOT, command
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.timeout(200)

CALCULATOR = str(ENVS / "calculator.py")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process, with text for its standard input."""

    def play(*words: str, text: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["play", *words])
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return play


def env_file(folder: Path, *lines: str) -> str:
    """Write a file with these lines behind the imports; returns its path."""
    file = folder / "env.py"
    file.write_text("\n".join(("from agentrl import AgentInstance, StepResult, Task, ToolEnv", *lines)))
    return str(file)


def test_a_person_at_a_terminal_plays_two_episodes() -> None:
    with Terminal("play", CALCULATOR, "--task", "mul-7-8") as terminal:
        assert "7*8=?" in terminal.until("you> ")
        terminal.type("/help\n")
        assert "/restart" in terminal.until("you> ")
        terminal.type('{"tool":"mul","args":[7,8]}\n')
        shown = terminal.until("you> ")
        assert "reward 0.2" in shown
        assert "56" in shown
        terminal.type("\n")
        terminal.until("no answer")
        terminal.until("you> ")
        terminal.type('"""\nIt is\n56\n"""\n')
        shown = terminal.until("next task, /restart")
        assert "reward 0.8" in shown
        assert "finished" in shown
        assert "reward 1, score 1" in shown
        terminal.type("/task add-2-3\n")
        assert "2+3=?" in terminal.until("you> ")
        terminal.type("no call\n")
        assert "reward 0, score 0" in terminal.until("next task")
        terminal.type("/quit\n")
        assert terminal.end() == 0
        assert terminal.attributes() == terminal.at_start


def test_a_person_may_be_the_model_of_a_black_box_agent(piped: Callable[..., Done]) -> None:
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    done = piped(str(ROOT / "examples" / "openai_agent.py"), "--task", "0", "--episodes", "1", text=f"{call}\n41\n")
    assert done.code == 0
    assert "<|tool|>42<|end|>" in done.out  # what the tool said, for the person to read
    assert "finished after 2 turns" in done.out


def test_control_c_at_the_prompt_closes_the_environment_and_gives_the_terminal_back(tmp_path: Path) -> None:
    env = env_file(
        tmp_path,
        "class Env(AgentInstance):",
        "    tasks = [Task('Say \\x1b[31mhi\\x07.')]",
        "    def step(self, state): return StepResult(1.0, terminated=True)",
        f"    async def close(self): open({str(tmp_path / 'closed')!r}, 'w').close()",
    )
    with Terminal("play", env) as terminal:
        shown = terminal.until("you> ")
        assert "Say \\x1b[31mhi\\x07." in shown
        terminal.until_it_waits()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert terminal.attributes() == terminal.at_start
    assert (tmp_path / "closed").exists()
    assert "Traceback" not in terminal.shown


def test_through_a_pipe_every_line_is_an_answer_and_no_engine_is_imported() -> None:
    python, *words = command("play", CALCULATOR, "--task", "mul-7-8")
    text = '{"tool":"mul","args":[7,8]}\n56\n/task add-1-1\nnothing\n'
    done = subprocess.run(
        [python, "-X", "importtime", *words], input=text, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after") == 2
    assert "reward 1, score 1" in done.stdout
    assert "1+1=?" in done.stdout
    assert "\x1b" not in done.stdout
    lines = done.stderr.splitlines()
    assert all(line.startswith("import time:") for line in lines)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert "transformers" in loaded
    assert not loaded & {"vllm", "ray", "deepspeed"}


def test_an_environment_that_fails_is_shown_and_is_the_exit_code(tmp_path: Path, piped: Callable[..., Done]) -> None:
    env = env_file(
        tmp_path,
        "class Env(AgentInstance):",
        "    tasks = [Task('Divide.')]",
        "    def step(self, state): return StepResult(1 / int(state.action_text))",
    )
    done = piped(env, text="0\n")
    assert done.code == 1
    assert "env_error after 0 turns" in done.out
    assert "Env.step raised ZeroDivisionError" in done.out
    assert not done.err


def test_rewards_data_and_gymnasium_can_be_played(piped: Callable[..., Done]) -> None:
    files = ROOT / "tests" / "openrlhf_files"
    done = piped(str(files / "reward_func.py"), "--prompts", str(files / "prompts.jsonl"), "--task", "0", text="2\n")
    assert "finished after 1 turn" in done.out, done.err
    done = piped("gym:FrozenLake-v1?is_slippery=False", "--max-turns", "2", text="right\nright\n")
    assert "truncated after 2 turns" in done.out, done.err


def test_agents_and_executors_of_openrlhf_are_played_by_hand(piped: Callable[..., Done]) -> None:
    files = ROOT / "tests" / "openrlhf_files"
    prompts = ("--prompts", str(files / "prompts.jsonl"), "--task", "0")
    done = piped(str(files / "feedback.py"), *prompts, text="5\n2\n")
    assert done.out.count("you>") == 2, done.err
    assert "<|user|>Wrong. Again.<|end|><|assistant|>" in done.out
    assert "finished after 2 turns" in done.out
    assert "reward 0.5, score 1" in done.out
    done = piped(str(files / "executor.py"), *prompts, text="5\n2\n")
    assert done.out.count("you>") == 2, done.err
    assert "<|user|>Again.<|end|><|assistant|>" in done.out
    assert "finished after 2 turns" in done.out
    assert "reward 1, score 1" in done.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nothing.py",), "no such file"),
        ((CALCULATOR, "--task", "nope"), "there is no such task"),
        ((CALCULATOR, "--logprobs"), "a person has none"),
        ((CALCULATOR, "--model", "./nothing"), "no such directory"),
        ((), "no environment is named"),
    ],
)
def test_wrong_requests_are_told_without_a_traceback(words: tuple[str, ...], told: str, piped: Callable[..., Done]) -> None:
    done = piped(*words)
    assert done.code == 2
    assert told in done.err
    assert "Traceback" not in done.err


def test_episodes_of_several_agents_can_be_played(tmp_path: Path, piped: Callable[..., Done]) -> None:
    env = env_file(
        tmp_path,
        "class Env(AgentInstance):",
        "    agents = ('ann', 'bob')",
        "    tasks = [Task('Talk.')]",
        "    def step(self, state): return StepResult(0.5, state.action_text.upper(), terminated=state.turn == 3)",
    )
    done = piped(env, text="one\ntwo\nthree\nfour\n")
    assert done.code == 0, done.err
    assert re.findall(r"^(\w+)> (\w+)", done.out, re.MULTILINE) == [("ann", "one"), ("bob", "two"), ("ann", "three"), ("bob", "four")]
    assert "ann: reward 1, score 1" in done.out


@pytest.mark.slow
def test_a_model_is_watched_turn_by_turn() -> None:
    words = ("play", CALCULATOR, "--task", "mul-7-8", "--model", "tiny", "--max-new-tokens", "32", "--logprobs", "--show-tokens")
    with Terminal(*words) as terminal:
        shown = terminal.until("Enter", timeout_s=120)
        assert "7*8=?" in shown
        assert "reads 31 tokens" in shown
        terminal.type("\n")
        shown = terminal.until(r"\[Enter\]")
        assert "<|end|>" in shown
        assert "log-probability" in shown
        assert "reward" in shown
        terminal.type("/quit\n")
        assert terminal.end() == 0


def test_a_model_that_reads_images_is_watched(piped: Callable[..., Done]) -> None:
    done = piped(str(ENVS / "shapes.py"), "--model", "tiny-vision", "--engine", "transformers", "--episodes", "1")
    assert done.code == 0
    assert "finished after 1 turn" in done.out


def test_pictures_are_shown_before_each_turn(piped: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = piped(str(ENVS / "picture_grid.py"), "--task", "0", text="left\nright\nnorth\n")
    assert done.code == 0, done.err
    shown = re.findall(r"picture (\d): 64 x 64 pixels, \d+ tokens, (\S+)\n", done.out)
    assert [number for number, _ in shown] == ["1", "2", "3"]
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for _, path in shown)
    assert "finished after 3 turns" in done.out


def test_tools_are_listed_and_the_text_has_the_latest_answer(tmp_path: Path, piped: Callable[..., Done]) -> None:
    env = env_file(
        tmp_path,
        "def add(first: int, second: int) -> int:",
        '    """Add two numbers.\n\n    Args:\n        first: A number.\n        second: Another one.\n    """',
        "    return first + second",
        "class Env(ToolEnv):",
        "    tools = (add,)",
        "    tasks = [Task('What is 2+3?', label='5')]",
        "    def judge(self, state): return float(state.action_text == '5')",
    )
    done = piped(env, text="my answer\n/text\n")
    assert "tool add(first: integer, second: integer)  Add two numbers." in done.out, done.err
    conversation = done.out.rpartition("reward")[2]
    assert "What is 2+3?" in conversation
    assert "<tool_call>" in conversation  # how the model is told of the tool
    assert "my answer<|end|>" in conversation
