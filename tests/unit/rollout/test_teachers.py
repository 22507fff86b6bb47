"""Teachers that are served beside the run."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.algo.teacher_specs import TeacherSpec, TeachingSettings, teacher_specs
from agentrl.assets import tiny_model_path
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError, RewardError
from agentrl.core.teaching import TeacherScores
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import FinishReason, GroupRequest, Status, Task, Trajectory, Turn, floats, ints
from agentrl.engine.teacher_model import TeacherModel
from agentrl.resolve.parts import episode_plan
from agentrl.rollout.teachers import HttpTeacher, Teachers
from tests.learner_support import write_model


def turn(prompt: list[int], tokens: list[int], **changes: Any) -> Turn:
    count = len(tokens)
    given = {"logprobs": floats([-1.0] * count), "versions": ints([0] * count), "finish_reason": FinishReason.STOP}
    return Turn(prompt_ids=ints(prompt), token_ids=ints(tokens), **given | changes)


def trajectory(*turns: Turn, **changes: Any) -> Trajectory:
    given: dict[str, Any] = {"status": Status.FINISHED, "reward": 1.0, "score": 1.0}
    return Trajectory(trajectory_id="a", episode_id="a", group_id=0, turns=turns, **given | changes)


def request(**metadata: str) -> GroupRequest:
    return GroupRequest(group_id=0, task=Task("x", id="t", metadata=metadata), n_samples_per_prompt=1, version=0)


class Scripted:
    """A teacher that gives each token the log-probability -place, and says which rows it saw."""

    def __init__(self, name: str, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self.name, self.error, self.delay_s = name, error, delay_s
        self.seen: list[tuple[list[int], list[int], int]] = []
        self.started = self.closed = False

    async def start(self) -> None:
        self.started = True

    async def score(self, tokens: Any, places: Any, top_k: int) -> TeacherScores:
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.seen.append((tokens.tolist(), places.tolist(), top_k))
        count = len(places)
        # 90 is no token of a policy with 64.
        top = np.stack([np.full(count, 90), places], 1).astype(np.int32), np.full((count, 2), -0.5, np.float32)
        return TeacherScores(-places.astype(np.float32), *top)

    async def close(self) -> None:
        self.closed = True


def teachers(text: str = "engine:a", made: dict[str, Scripted] | None = None, **changes: Any) -> Teachers:
    made = {} if made is None else made
    return Teachers(TeachingSettings(specs=teacher_specs(text), top_k=2, **changes), lambda name: made.setdefault(name, Scripted(name)))


def judged(found: Teachers, trajectories: tuple[Trajectory, ...], group_request: GroupRequest | None = None) -> tuple[Trajectory, ...]:
    return asyncio.run(found.judge(group_request or request(), trajectories, 64))


def test_each_context_is_scored_once_with_all_that_came_before() -> None:
    made: dict[str, Scripted] = {}
    turns = (turn([1, 2], [3, 4]), turn([5], [6]), turn([1, 9], [8], fresh=True))
    (found,) = judged(teachers(made=made), (trajectory(*turns),))
    assert sorted(made["a"].seen) == [([1, 2, 3, 4, 5, 6], [2, 3, 5], 2), ([1, 9, 8], [2], 2)]
    scores = [each.teacher for each in found.turns]
    assert [each.logprobs.tolist() for each in scores if each] == [[-2.0, -3.0], [-5.0], [-2.0]]
    assert [each.top_ids.tolist() for each in scores if each] == [[[0, 2], [0, 3]], [[0, 5]], [[0, 2]]]
    assert all(each is not None and (each.top_logprobs == [-math.inf, -0.5]).all() for each in scores)
    assert "teacher_s" in found.timings


def test_what_is_not_trained_is_not_scored() -> None:
    made: dict[str, Scripted] = {}
    failed = trajectory(turn([1], [2]), status=Status.ENV_ERROR, reward=None, score=None)
    frozen = trajectory(turn([1], [2]), frozen=True)
    helper = trajectory(turn([1], [2], masked="a helper"), turn([3], [4], fresh=True))
    assert judged(teachers(made=made), (failed,)) == (failed,)
    one, two = judged(teachers(made=made), (frozen, helper))
    assert (one.turns[0].teacher, two.turns[0].teacher) == (None, None)
    assert [tokens for scripted in made.values() for tokens, *_ in scripted.seen] == [[3, 4]]


@pytest.mark.parametrize(
    ("metadata", "by", "chosen"),
    [({"kind": "math"}, "", "a"), ({"teacher": "code", "kind": "math"}, "", "b"), ({"topic": "code"}, "topic", "b")],
)
def test_the_task_names_its_teacher(metadata: dict[str, str], by: str, chosen: str) -> None:
    made: dict[str, Scripted] = {}
    judged(teachers("math=engine:a,code=engine:b", made, by=by), (trajectory(turn([1], [2])),), request(**metadata))
    assert {name for name, scripted in made.items() if scripted.seen} == {chosen}


def test_a_task_of_no_teacher_and_a_teacher_that_fails_make_failed_episodes() -> None:
    (found,) = judged(teachers("math=engine:a,code=engine:b"), (trajectory(turn([1], [2])),), request(kind="art"))
    assert (found.status, found.reward) == (Status.ENV_ERROR, None)
    assert "'art', and --teacher names math, code" in str(found.error)
    (found,) = judged(teachers(made={"a": Scripted("a", RewardError("gone"))}), (trajectory(turn([1], [2])),))
    assert (found.status, found.error) == (Status.ENV_ERROR, "RewardError: gone")
    (found,) = judged(teachers(made={"a": Scripted("a", delay_s=5.0)}, timeout_s=0.05), (trajectory(turn([1], [2])),))
    assert (found.status, "within 0.05 s" in str(found.error)) == (Status.TIMEOUT, True)
    (found,) = judged(teachers(), (trajectory(turn([1], [2], temperature=0.7)),))
    assert "at temperature 1, and a turn was sampled at 0.7" in str(found.error)


def test_teachers_are_started_and_closed() -> None:
    made: dict[str, Scripted] = {}

    async def live() -> None:
        found = teachers("math=engine:a,code=engine:b", made)
        await found.start()
        await found.close()

    asyncio.run(live())
    assert [(each.started, each.closed) for each in made.values()] == [(True, True)] * 2


def test_settings_follow_from_the_run() -> None:
    config = changed(TrainConfig(), teacher="engine:a", teacher_loss="forward", teacher_top_k=7, teacher_by="k", reward_timeout_s=9.0)
    found = episode_plan(config).teaching
    assert found == TeachingSettings(specs=teacher_specs("engine:a"), top_k=7, by="k", timeout_s=9.0)
    assert episode_plan(changed(config, teacher_loss="sampled")).teaching == replace(found, top_k=1)
    assert episode_plan(changed(config, teacher="a")).teaching is None


@contextmanager
def service(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[tuple[TeacherSpec, list[tuple[str, Any, str]]]]:
    """A server that answers by a function of path and body; yields how to reach it, and what it was asked."""
    asked: list[tuple[str, Any, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body, self.headers.get("Authorization", "")))
            status, told = answer(self.path, body)
            text = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        (spec,) = teacher_specs(f"http://127.0.0.1:{server.server_port}/v1#model=big&api_key_env=TEACHER_KEY")
        yield spec, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked_of(spec: TeacherSpec, tokens: list[int], places: list[int], top_k: int) -> TeacherScores:
    async def ask() -> TeacherScores:
        teacher = HttpTeacher(spec, timeout_s=5.0)
        await teacher.start()
        try:
            return await teacher.score(ints(tokens), ints(places), top_k)
        finally:
            await teacher.close()

    return asyncio.run(ask())


def entry(**logprobs: float) -> dict[str, Any]:
    return {name.removeprefix("t"): {"logprob": value, "rank": 1, "decoded_token": "x"} for name, value in logprobs.items()}


def test_a_server_of_vllm_is_asked_for_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    rows = [None, entry(t5=-3.0, t1=-2.0, t2=-0.1), entry(t6=-0.2, t1=-4.0), entry(t7=-9.0, t3=-0.4)]
    with service(lambda path, body: (200, {"choices": [{"prompt_logprobs": rows}]})) as (spec, asked):
        found = asked_of(spec, [4, 5, 6, 7], [1, 3], 2)
    assert found.logprobs.tolist() == pytest.approx([-3.0, -9.0])
    assert found.top_ids.tolist() == [[2, 1], [3, 7]]
    assert found.top_logprobs.tolist() == [pytest.approx([-0.1, -2.0]), pytest.approx([-0.4, -9.0])]
    path, body, key = asked[0]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body == {"model": "big", "prompt": [4, 5, 6, 7], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 2}


@pytest.mark.parametrize(
    ("status", "answer", "problem"),
    [
        (200, {"choices": [{"text": "x"}]}, "has no prompt_logprobs of all 2 tokens"),
        (200, {"choices": [{"prompt_logprobs": [None]}]}, "1 entries for 2 tokens"),
        (200, {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}]}, "has no prompt_logprobs"),
        (400, {"error": "prompt_logprobs is too large"}, "prompt_logprobs is too large"),
    ],
)
def test_an_answer_that_is_none_is_an_error(status: int, answer: Any, problem: str) -> None:
    with service(lambda path, body: (status, answer)) as (spec, _), pytest.raises(RewardError, match=problem):
        asked_of(spec, [1, 2], [1], 1)


def test_another_tokenizer_is_refused_by_name() -> None:
    tokenizer = load_tokenizer(str(tiny_model_path()))

    def check(answer: Callable[[str, Any], tuple[int, Any]]) -> list[tuple[str, Any, str]]:
        with service(answer) as (spec, asked):
            asyncio.run(HttpTeacher(spec, timeout_s=5.0).check_tokenizer(tokenizer))
        return asked

    asked = check(lambda path, body: (200, {"prompt": tokenizer.decode(body["tokens"])}))
    assert {path for path, *_ in asked} == {"/detokenize"}
    assert sorted(token for _, body, _ in asked for token in body["tokens"]) == list(range(len(tokenizer)))
    with pytest.raises(ConfigError, match=r"--teacher = 'http://127.*has another tokenizer than the model: ids 0 to"):
        check(lambda path, body: (200, {"prompt": tokenizer.decode(body["tokens"][::-1])}))
    with pytest.raises(ConfigError, match=r"does not tell its tokenizer.*tokenizer=DIR"):
        check(lambda path, body: (404, {"detail": "Not Found"}))


def test_a_model_in_this_process_scores_as_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("agentrl.engine.teacher_model.CHUNK", 700)  # two rows of the vocabulary at once
    model, tokens, places = str(tiny_model_path()), ints([5, 9, 33, 7, 12, 40]), ints([1, 2, 4, 5])

    async def ask() -> TeacherScores:
        teacher = TeacherModel(model)
        with pytest.raises(RewardError, match="is not loaded"):
            await teacher.score(tokens, places, 3)
        await teacher.start()
        found = await teacher.score(tokens, places, 3)
        await teacher.close()
        return found

    found = asyncio.run(ask())
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([tokens.tolist()])).logits[0].log_softmax(-1)
    for row, place in enumerate(places.tolist()):
        best = whole[place - 1].topk(3)
        assert float(found.logprobs[row]) == pytest.approx(float(whole[place - 1, int(tokens[place])]), abs=1e-5)
        assert found.top_ids[row].tolist() == best.indices.tolist()
        assert found.top_logprobs[row].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Any) -> None:
    broken = Path(write_model(tmp_path / "broken"))
    (broken / "model.safetensors").write_text("none")
    for path in (tmp_path, broken):
        with pytest.raises(ConfigError, match=r"--teacher = 'engine:.*cannot be loaded"):
            asyncio.run(TeacherModel(str(path)).start())


def test_tokens_that_only_the_teacher_has_are_left_out() -> None:
    ids, logprobs = np.array([[3, 4, 5]], dtype=np.int32), np.array([[-1.0, -2.0, -3.0]], dtype=np.float32)
    found = TeacherScores(np.array([-1.0], dtype=np.float32), ids, logprobs).within(4)
    assert found.top_ids.tolist() == [[3, 0, 0]]
    assert found.top_logprobs.tolist() == [[-1.0, -np.inf, -np.inf]]
