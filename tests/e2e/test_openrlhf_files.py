"""Files in OpenRLHF's form, and reward servers, on real vLLM and DeepSpeed through the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from envs.shapes import COLOURS, draw
from tests.e2e.runs import Run, succeeded, train

pytestmark = pytest.mark.timeout(400)

FILES = Path(__file__).parents[1] / "openrlhf_files"
TINY = ("--runtime", "local", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "16", "--no-save-model")
PROMPTS = ("--prompts", str(FILES / "prompts.jsonl"))


def trained(run: Run, groups: int) -> Run:
    """The run, once it is sure that every group was trained on at the first attempt."""
    ledger = succeeded(run).summary["ledger"]
    assert (ledger["submitted"], ledger["trained"]) == (groups, groups), run.output
    assert {row["failures/retries"] for row in run.metrics} == {0}
    return run


@pytest.mark.slow
def test_a_file_with_feedback_trains_unchanged(tmp_path: Path) -> None:
    run = trained(train(tmp_path / "run", "--num-steps", "2", *TINY, *PROMPTS, agent=FILES / "feedback.py"), 4)
    assert max(row["episode/turns_mean"] for row in run.metrics) > 1
    assert "env/right" in run.metrics[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("single_turn", ""),
        ("sampling", "env/temperature"),
        ("extra_logs", "env/length"),
        ("reward_func", "env/length"),
        ("executor", "env/tries"),
    ],
)
def test_every_other_form_trains_unchanged(tmp_path: Path, name: str, metric: str) -> None:
    run = trained(train(tmp_path / "run", "--num-steps", "2", *TINY, *PROMPTS, agent=FILES / f"{name}.py"), 4)
    assert not metric or metric in run.metrics[-1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_file_with_pictures_trains_unchanged(tmp_path: Path, vision_model: str, engine: str) -> None:
    rows = []
    for number, name in enumerate(COLOURS):
        Image.fromarray(draw([("circle", name, 32, 32)])).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "Which colour?", "label": name, "pictures": [str(tmp_path / f"{number}.png")]})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--prompts", str(tmp_path / "prompts.jsonl"), "--image-key", "pictures", "--model", vision_model, "--engine", engine)
    run = trained(
        train(tmp_path / "run", "--num-steps", "2", "--skip-checks", "env", "model", *TINY, *words, agent=FILES / "pictures.py"), 4
    )
    assert [row["episode/turns_mean"] for row in run.metrics] == [3.0, 3.0]
    assert max(row["mismatch/max"] for row in run.metrics) < 1e-4


def right(answer: str, label: str) -> float:
    return float(label in answer)


@contextmanager
def reward_server(judge: Callable[[str, str], float] = right) -> Iterator[str]:
    """Judges answers with a function of answer and label."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            triples = zip(body["query"], body["prompts"], body["labels"], strict=True)
            rewards = [judge(query[len(prompt) :], label) for query, prompt, label in triples]
            answer = json.dumps({"rewards": rewards, "extra_logs": {"asked": 1.0}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/get_reward"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_reward_server_judges_a_run(tmp_path: Path) -> None:
    with reward_server() as url:
        run = trained(train(tmp_path / "run", "--num-steps", "2", *TINY, *PROMPTS, "--remote-rm-url", url, agent=""), 4)
    assert run.metrics[-1]["env/asked"] == 1.0


JUDGE = """
def judge(answer, label):
    return (len(answer) % 7) / 7 + float(label in answer)
"""
FUNCTION = """
def reward_func(queries, prompts, labels):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts, strict=True)]
    return {"rewards": [judge(answer, label) for answer, label in zip(answers, labels, strict=True)]}
"""
SCORER = """
def reward(completion, label):
    return judge(completion, label)
"""


def episodes(run: Run) -> dict[str, tuple[str, float, float]]:
    """What was written, the reward and the score of each episode, by its name."""
    records = map(json.loads, (trained(run, 4).directory / "trajectories.jsonl").read_text().splitlines())
    return {record["trajectory_id"]: (record["turns"][0]["text"], record["reward"], record["score"]) for record in records}


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_reward_file_plain_scorer_and_server_judge_the_same_episodes_alike(tmp_path: Path) -> None:
    found = {}
    for name, text in {"function": FUNCTION, "scorer": SCORER}.items():
        file = tmp_path / f"{name}.py"
        file.write_text(JUDGE + text)
        found[name] = episodes(train(tmp_path / name, "--num-steps", "2", *TINY, *PROMPTS, agent=file))
    names: dict[str, Callable[[str, str], float]] = {}
    exec(JUDGE, names)
    with reward_server(names["judge"]) as url:
        options = ("--num-steps", "2", *TINY, *PROMPTS, "--remote-rm-url", url)
        found["server"] = episodes(train(tmp_path / "server", *options, agent=""))
    assert found["function"] == found["scorer"] == found["server"]
    assert len(found["function"]) >= 4  # records are a sample of the episodes
    assert len({reward for _, reward, _ in found["function"].values()}) > 1
