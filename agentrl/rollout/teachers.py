"""Teachers that are served beside the run: they score what the policy sampled when an episode has ended."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from agentrl.algo.teacher_specs import FLAG, TeacherSpec, TeachingSettings, teacher_of
from agentrl.core.errors import AgentRLError, ConfigError, RemoteError, RewardError
from agentrl.core.teaching import Teacher, TeacherScores
from agentrl.core.types import GroupRequest, IntArray, Status, Task, Trajectory, Turn, floats, ints
from agentrl.rollout.learned import contexts, failed

if TYPE_CHECKING:
    from agentrl.env.remote.http import HttpSession, JsonClient

KEY = "OPENAI_API_KEY"
MAX_ANSWER = 2**28
"""Bytes of an answer: 20 tokens with their texts for each of 100,000 tokens."""
PIECE = 4096
"""Ids of the vocabulary that a service is asked for at once."""

MakeTeacher: TypeAlias = Callable[[str], Teacher]
"""Makes the teacher for the model of a directory or of the hub; it is not started."""


class Teachers:
    """Adds the scores of its task's teacher to each turn of an episode that is to be trained; one per rollout worker.

    A teacher does not change, so its scores do not age while the episode waits for its step. A teacher that fails makes a failed
    episode, which is tried again.
    """

    def __init__(self, settings: TeachingSettings, make: MakeTeacher | None = None) -> None:
        self._settings = settings
        self._names = [spec.name for spec in settings.specs]
        self._teachers = [_teacher(spec, settings, make) for spec in settings.specs]

    async def start(self) -> None:
        """Load every teacher that runs here."""
        await asyncio.gather(*(teacher.start() for teacher in self._teachers))

    async def close(self) -> None:
        """Release all; safe to call twice."""
        await asyncio.gather(*(teacher.close() for teacher in self._teachers), return_exceptions=True)

    async def judge(self, group_request: GroupRequest, trajectories: tuple[Trajectory, ...], vocabulary: int) -> tuple[Trajectory, ...]:
        """Return the trajectories of one episode with scores of the teacher; if it fails, all of them with the status of a failure.

        Most likely tokens from `vocabulary` on, which the policy does not have, are left out.
        """
        if not any(trajectory.trainable for trajectory in trajectories):
            return trajectories
        start, limit = time.perf_counter(), self._settings.timeout_s
        try:
            teacher = self._of(group_request.task)
            async with asyncio.timeout(limit):
                judged = await asyncio.gather(*(self._judged(teacher, each, vocabulary) for each in trajectories))
        except TimeoutError:
            return failed(trajectories, Status.TIMEOUT, f"the teacher gave no scores within {limit:g} s (--reward-timeout-s)")
        except AgentRLError as error:
            return failed(trajectories, Status.ENV_ERROR, f"{type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        return tuple(replace(each, timings={**each.timings, "teacher_s": seconds}) for each in judged)

    def _of(self, task: Task) -> Teacher:
        keys = (self._settings.by,) if self._settings.by else ("teacher", "kind", "source")
        wanted = next((str(task.metadata[key]) for key in keys if key in task.metadata), "")
        index = teacher_of(self._names, wanted)
        if index is None:
            known = ", ".join(self._names)
            raise RewardError(f"task {task.id!r} is of kind {wanted!r}, and --teacher names {known}: see --teacher-by")
        return self._teachers[index]

    async def _judged(self, teacher: Teacher, trajectory: Trajectory, vocabulary: int) -> Trajectory:
        if not trajectory.trainable:
            return trajectory
        parts = [part for part in contexts(trajectory.turns) if not trajectory.turns[part[0]].masked]
        scored = await asyncio.gather(*(self._context(teacher, [trajectory.turns[index] for index in part]) for part in parts))
        turns = list(trajectory.turns)
        for part, scores in zip(parts, scored, strict=True):
            begin = 0
            for index in part:
                end = begin + len(turns[index].token_ids)
                turns[index] = replace(turns[index], teacher=scores.part(begin, end).within(vocabulary))
                begin = end
        return replace(trajectory, turns=tuple(turns))

    async def _context(self, teacher: Teacher, turns: Sequence[Turn]) -> TeacherScores:
        if any(turn.images for turn in turns):
            raise RewardError("a served teacher reads text only, and the episode has images: use --teacher MODEL")
        if hot := next((turn.temperature for turn in turns if turn.temperature != 1.0), None):
            raise RewardError(f"a served teacher scores at temperature 1, and a turn was sampled at {hot:g}: leave sampling as it is")
        parts = [part for turn in turns for part in (turn.prompt_ids, turn.token_ids)]
        sampled = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        return await teacher.score(ints(np.concatenate(parts)), ints(np.flatnonzero(sampled).astype(np.int32)), self._settings.top_k)


def _teacher(spec: TeacherSpec, settings: TeachingSettings, make: MakeTeacher | None) -> Teacher:
    if spec.kind == "endpoint":
        return HttpTeacher(spec, settings.timeout_s)
    if make is None:
        raise ConfigError(FLAG, f"engine:{spec.where}", "nothing here loads a model", "Give the address of a service.")
    return make(spec.where)


class HttpTeacher:
    """A `Teacher` behind vLLM's server, or one that answers ``/completions`` with ``prompt_logprobs`` as vLLM does."""

    def __init__(self, spec: TeacherSpec, timeout_s: float = 60.0) -> None:
        self._spec, self._timeout_s = spec, timeout_s
        self._client: JsonClient | None = None

    async def start(self) -> None:
        """As `Teacher.start`: the service is asked when there is something to score."""

    async def close(self) -> None:
        """As `Teacher.close`."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def score(self, tokens: IntArray, places: IntArray, top_k: int) -> TeacherScores:
        """As `Teacher.score`."""
        body = {
            "model": self._spec.options["model"],
            "prompt": tokens.tolist(),
            # vLLM samples one token at least; only the log-probabilities of the prompt are used.
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": max(1, top_k),
        }
        answer = await self._ask("/completions", body)
        try:
            found = answer["choices"][0].get("prompt_logprobs") or answer["prompt_logprobs"]
            return _scores(found, tokens, places, top_k)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            problem = f"its answer has no prompt_logprobs of all {len(tokens)} tokens ({type(error).__name__}: {error})"
            raise RewardError(f"{FLAG} {self._spec.where}: {problem}; vLLM's server gives them") from error

    async def check_tokenizer(self, tokenizer: Any) -> None:
        """Make sure that the service has the tokenizer of the policy, by the text that it makes of every id.

        Raises:
            ConfigError: If it has another, or does not tell.
        """
        address, size = self._spec.where, len(tokenizer)
        # vLLM has this route beside `/v1`, not below it.
        root = address.removesuffix("/v1")
        client = _client(root, self._timeout_s)
        try:
            for begin in range(0, size, PIECE):
                ids = list(range(begin, min(size, begin + PIECE)))
                body = {"model": self._spec.options["model"], "tokens": ids}
                theirs = (await client.call("POST", "/detokenize", body, session=self._session())).json()["prompt"]
                if theirs != tokenizer.decode(ids):
                    problem = f"has another tokenizer than the model: ids {ids[0]} to {ids[-1]} are other tokens"
                    raise ConfigError(FLAG, address, problem, "Serve a model of the same family.")
        except (RemoteError, KeyError, TypeError) as error:
            problem = f"does not tell its tokenizer at {root}/detokenize: {error}"
            raise ConfigError(FLAG, address, problem, "Start the service, or name its tokenizer: #model=NAME&tokenizer=DIR.") from error
        finally:
            await client.aclose()

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        if self._client is None:
            self._client = _client(self._spec.where, self._timeout_s)
        try:
            return (await self._client.call("POST", path, dict(body), session=self._session())).json()
        except RemoteError as error:
            raise RewardError(f"{FLAG} {self._spec.where}: {error}") from error

    def _session(self) -> HttpSession:
        from agentrl.env.remote.http import HttpSession

        key = os.environ.get(self._spec.options.get("api_key_env", KEY), "")
        return HttpSession(headers={"Authorization": f"Bearer {key}"} if key else {})


def _client(address: str, timeout_s: float) -> JsonClient:
    from agentrl.env.remote.http import HttpLimits, JsonClient  # only now: httpx takes long to import

    return JsonClient([address], HttpLimits(timeout_s=timeout_s, attempt_timeout_s=timeout_s / 2, max_bytes=MAX_ANSWER))


def _scores(found: Sequence[Any], tokens: IntArray, places: IntArray, top_k: int) -> TeacherScores:
    """Read vLLM's answer: for each token of the prompt an object from ids to log-probabilities, the token's own and those of the best."""
    if len(found) != len(tokens):
        raise ValueError(f"{len(found)} entries for {len(tokens)} tokens")
    chosen = np.empty(len(places), np.float32)
    ids, logprobs = np.zeros((len(places), top_k), np.int32), np.full((len(places), top_k), -np.inf, np.float32)
    for row, place in enumerate(places.tolist()):
        entries = {int(token): float(entry["logprob"]) for token, entry in found[place].items()}
        chosen[row] = entries[int(tokens[place])]
        # The token itself comes besides the best ones, so there may be one too many.
        best = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))[:top_k]
        ids[row, : len(best)], logprobs[row, : len(best)] = zip(*best, strict=True)
    return TeacherScores(floats(chosen), ints(ids), floats(logprobs))
