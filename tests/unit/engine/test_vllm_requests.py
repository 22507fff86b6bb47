"""What becomes of the outputs of vLLM's core, which is played here; `tests/e2e/test_vllm_engine.py` compares answers of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from agentrl.engine.vllm_requests import Answer, Requests

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Core:
    """Takes requests, and gives the outputs that a test puts into it; an exception among them is raised."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.refused: Exception | None = None  # is raised in place of taking the next request
        self.free = asyncio.Event()  # there is room for requests in the socket
        self.free.set()
        self.aborted: list[str] = []
        self.steps: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        if not self.free.is_set():
            await self.free.wait()
        refused, self.refused = self.refused, None
        if refused is not None:
            raise refused
        self.requests.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> Any:
        step = await self.steps.get()
        if isinstance(step, Exception):
            raise step
        return step

    def put(self, *outputs: Any, version: str | None = "0") -> None:
        from vllm.v1.engine import EngineCoreOutputs

        self.steps.put_nowait(EngineCoreOutputs(outputs=list(outputs), weight_version=version, scheduler_stats=f"stats of {version}"))  # type: ignore[arg-type]


class Inputs:
    """Checks nothing, and notes what it was given."""

    tokenizer = None

    def __init__(self) -> None:
        self.checked: list[str] = []

    def process_inputs(self, name: str, prompt: Any, params: Any, *, supported_tasks: Any, lora_request: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest

        self.checked.append(name)
        plain: dict[str, Any] = dict.fromkeys(("mm_features", "pooling_params", "cache_salt", "data_parallel_rank"))
        ids = prompt["prompt_token_ids"]
        more: dict[str, Any] = {"sampling_params": params, "arrival_time": 0.0, "lora_request": lora_request}
        return EngineCoreRequest(request_id=name, prompt_token_ids=ids, **more, **plain)


class Scene:
    """Requests to a core that is played."""

    def __init__(self, *, stamps: bool = True) -> None:
        from agentrl.engine.vllm_requests import Requests

        self.core, self.inputs, self.loads = Core(), Inputs(), list[Any]()
        self.asked: list[asyncio.Task[Answer]] = []
        llm: Any = SimpleNamespace(engine_core=self.core, input_processor=self.inputs, get_supported_tasks=self._tasks)
        self.requests: Requests = Requests(llm, self.loads.append, stamps=stamps)

    async def _tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def ask(self, name: str, **changes: Any) -> asyncio.Task[Answer]:
        """Send a request, and wait until the core has it."""
        from vllm.sampling_params import SamplingParams

        given: dict[str, Any] = {"max_tokens": 8, "seed": 1, "settings": 1.0} | changes
        salt = {"cache_salt": given.pop("salt")} if "salt" in given else {}
        prompt = {"prompt_token_ids": given.pop("ids", [5]), **salt}
        task = asyncio.create_task(self.requests.sample(name, prompt, SamplingParams, **given))
        self.asked.append(task)
        await settle()
        return task

    async def end(self) -> None:
        """End what is under way."""
        self.requests.close(RuntimeError("closed"))
        await asyncio.gather(*self.asked, return_exceptions=True)

    def name(self, number: int) -> str:
        """Name under which the core knows the request with this number."""
        return str(self.core.requests[number].request_id)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def output(name: str, ids: Sequence[int], *, ends: str = "", cached: int | None = None) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    columns = np.array([[-float(i), -99.0] for i in ids], dtype=np.float32).reshape(-1, 2)
    logprobs = LogprobsLists(np.zeros_like(columns, dtype=np.int32), columns, np.zeros(len(ids), dtype=np.int32)) if ids else None
    stats: Any = None if cached is None else SimpleNamespace(num_cached_tokens=cached)
    reason = FinishReason[ends] if ends else None
    return EngineCoreOutput(name, list(ids), new_logprobs=logprobs, finish_reason=reason, prefill_stats=stats)


async def test_each_token_has_its_own_logprob_and_the_version_of_its_step() -> None:
    scene = Scene()
    one, two = await scene.ask("a"), await scene.ask("b")
    scene.core.put(output(scene.name(0), [7], cached=32), output(scene.name(1), [3], cached=0), output("nobody's", [1]))
    scene.core.put(output(scene.name(0), [8, 9], cached=64), version="4")
    scene.core.put(output(scene.name(1), [2], ends="LENGTH"), output(scene.name(0), [1], ends="STOP"), version=None)
    first, second = await one, await two
    assert (first.token_ids, first.logprobs, first.versions) == ([7, 8, 9, 1], [-7.0, -8.0, -9.0, -1.0], [0, 4, 4, 0])
    assert (first.cached_tokens, str(first.finish_reason)) == (32, "stop")  # what a request recomputes later was no cached prompt
    assert (second.token_ids, second.versions, str(second.finish_reason)) == ([3, 2], [0, 0], "length")
    assert scene.loads == ["stats of 0", "stats of 4", "stats of None"]
    assert scene.core.aborted == []


async def test_a_core_without_stamps_may_name_versions_as_it_likes() -> None:
    scene = Scene(stamps=False)
    one = await scene.ask("a")
    scene.core.put(output(scene.name(0), [7], ends="STOP", cached=0), version="default")
    assert (await one).versions == [0]


async def test_settings_that_were_checked_once_are_not_checked_again() -> None:
    scene = Scene()
    await scene.ask("a", ids=[5, 6], seed=3, max_tokens=4)
    await scene.ask("b", ids=[7], seed=9, max_tokens=2)
    await scene.ask("c", seed=None)
    await scene.ask("d", settings=2.0)
    await scene.ask("e", settings=None)
    await scene.ask("f", settings=None, adapter="low-rank")
    assert scene.inputs.checked == ["a", "c", "d", "e", "f"]
    made = scene.core.requests
    assert [each.prompt_token_ids for each in made[:2]] == [[5, 6], [7]]
    assert [(each.sampling_params.seed, each.sampling_params.max_tokens) for each in made[:3]] == [(3, 4), (9, 2), (None, 8)]
    assert len({each.request_id for each in made}) == 6
    assert made[0].sampling_params is not made[1].sampling_params
    assert [each.lora_request for each in made[3:]] == [None, None, "low-rank"]
    assert made[1].arrival_time > 0.0
    await scene.ask("g", salt="7")
    assert [each.cache_salt for each in made] == [None] * 6 + ["7"]  # keys and values of other weights are not its own
    await scene.end()


def ask_at_once(scene: Scene, names: Sequence[str]) -> list[asyncio.Task[Answer]]:
    """Requests of one round of the event loop; they are not made yet."""
    from vllm.sampling_params import SamplingParams

    def begin(name: str) -> asyncio.Task[Answer]:
        given: dict[str, Any] = {"max_tokens": 8, "seed": 1, "settings": 1.0}
        return asyncio.create_task(scene.requests.sample(name, {"prompt_token_ids": [5]}, SamplingParams, **given))

    tasks = list(map(begin, names))
    scene.asked += tasks
    return tasks


async def test_requests_of_one_round_are_sent_together_and_many_before_it_is_over() -> None:
    from agentrl.engine.vllm_requests import AT_ONCE

    scene, sent = Scene(), list[int]()
    await scene.ask("checked", settings=1.0)
    ask_at_once(scene, ["a", "b", "c"])
    asyncio.get_running_loop().call_soon(lambda: sent.append(len(scene.core.requests)))  # runs after all three, in the same round
    await settle()
    assert (sent, len(scene.core.requests)) == ([1], 4)
    ask_at_once(scene, [str(number) for number in range(AT_ONCE + 3)])
    asyncio.get_running_loop().call_soon(lambda: sent.append(len(scene.core.requests)))
    await settle()
    assert (sent, len(scene.core.requests)) == ([1, 4 + AT_ONCE], 4 + AT_ONCE + 3)
    assert len({request.request_id for request in scene.core.requests}) == len(scene.core.requests)
    await scene.end()


async def test_a_request_that_nobody_wants_any_more_is_not_sent() -> None:
    scene = Scene()
    await scene.ask("checked", settings=1.0)
    cancelled, aborted, other = ask_at_once(scene, ["a", "b", "c"])
    asyncio.get_running_loop().call_soon(cancelled.cancel)  # after they were made, before they are sent
    aborting = asyncio.create_task(scene.requests.abort("b"))  # likewise
    await settle()
    assert [request.external_req_id for request in scene.core.requests[1:]] == ["c"]
    assert cancelled.cancelled()
    assert str((await aborted).finish_reason) == "abort"
    await aborting
    assert not other.done()
    await scene.end()


async def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    scene = Scene()
    await scene.ask("checked", settings=1.0)
    first, second = ask_at_once(scene, ["a", "b"])
    scene.core.refused = ValueError("cannot be encoded")
    await settle()
    with pytest.raises(ValueError, match="cannot be encoded"):
        await first
    scene.core.put(output(scene.name(1), [7], ends="STOP", cached=0))
    assert (await second).token_ids == [7]


async def test_a_call_that_is_cancelled_while_it_sends_for_others_leaves_none_of_them_waiting() -> None:
    from agentrl.engine.vllm_requests import AT_ONCE

    scene = Scene()
    await scene.ask("checked", settings=1.0)
    scene.core.free.clear()
    tasks = ask_at_once(scene, [str(number) for number in range(AT_ONCE)])
    await settle()
    tasks[-1].cancel()  # it waits for room with the first request
    await settle()
    with pytest.raises(RuntimeError, match="it was not sent"):
        await tasks[0]
    assert [name.partition("-")[0] for name in scene.core.aborted] == [str(AT_ONCE - 1), "0"]
    scene.core.free.set()
    await settle()
    assert [request.external_req_id for request in scene.core.requests[1:]] == [str(number) for number in range(1, AT_ONCE - 1)]
    await scene.end()


async def test_no_more_settings_are_remembered_than_a_user_needs() -> None:
    from agentrl.engine.vllm_requests import MAX_CHECKED

    scene = Scene()
    for number in range(2 * MAX_CHECKED + 1):
        await scene.ask(str(number), settings=number)
    assert len(scene.requests._checked) <= MAX_CHECKED
    await scene.end()


async def test_aborted_requests_return_what_there_is_and_cancelled_ones_leave_the_core() -> None:
    scene = Scene()
    aborted, cancelled, other = await scene.ask("a"), await scene.ask("b"), await scene.ask("c")
    scene.core.put(*(output(scene.name(number), [7], cached=0) for number in range(3)))
    await settle()
    await scene.requests.abort("a")
    await scene.requests.abort("nobody's")
    cancelled.cancel()
    answer = await aborted
    assert (answer.token_ids, str(answer.finish_reason)) == ([7], "abort")
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert scene.core.aborted == [scene.name(0), scene.name(1)]
    scene.core.put(output(scene.name(0), [8]), output(scene.name(1), [8]), output(scene.name(2), [8], ends="STOP"))
    assert (await other).token_ids == [7, 8]
    assert answer.token_ids == [7]
    assert scene.core.aborted == [scene.name(0), scene.name(1)]


async def test_nobody_is_told_of_tokens_once_the_call_is_cancelled() -> None:
    scene, told = Scene(), list[list[int]]()
    task = await scene.ask("a", listener=lambda ids: told.append(list(ids)))
    scene.core.put(output(scene.name(0), [7], cached=0))
    await settle()
    scene.core.put(output(scene.name(0), [8]))  # read before the call goes on
    task.cancel()
    await settle()
    assert told == [[7]]
    assert scene.core.aborted == [scene.name(0)]


async def test_late_outputs_of_an_ended_request_are_not_those_of_another_with_its_name() -> None:
    scene = Scene()
    first = await scene.ask("a")
    await scene.requests.abort("a")
    second = await scene.ask("a")
    scene.core.put(output(scene.name(0), [7], ends="STOP", cached=0))
    await settle()
    assert not second.done()
    scene.core.put(output(scene.name(1), [8], ends="STOP", cached=0))
    assert [(await task).token_ids for task in (first, second)] == [[], [8]]


async def test_what_a_listener_raises_ends_its_own_request() -> None:
    scene, told = Scene(), list[list[int]]()

    def listen(ids: Sequence[int]) -> None:
        told.append(list(ids))
        if 8 in ids:
            raise ValueError("no more")

    one, two = await scene.ask("a", listener=listen), await scene.ask("b")
    scene.core.put(output(scene.name(0), [7], cached=0), output(scene.name(1), [7], cached=0))
    scene.core.put(output(scene.name(0), [8, 9]), output(scene.name(1), [8]))
    with pytest.raises(ValueError, match="no more"):
        await one
    assert told == [[7], [8, 9]]
    assert scene.core.aborted == [scene.name(0)]
    scene.core.put(output(scene.name(1), [], ends="STOP"))
    assert (await two).token_ids == [7, 8]


async def test_a_stop_string_ends_a_request_of_which_the_core_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    looks: list[Any] = []

    class Looks:
        def __init__(self) -> None:
            self.kept: list[int] = []
            looks.append(self)

        def num_output_tokens(self) -> int:
            return len(self.kept)

        def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
            self.stopped = stop_terminated
            found = 8 in new_token_ids
            self.kept += new_token_ids[: new_token_ids.index(8) + 1] if found else new_token_ids
            return "eight" if found else None

    monkeypatch.setattr(IncrementalDetokenizer, "from_new_request", lambda tokenizer, request: Looks())
    scene = Scene()
    given: dict[str, Any] = {"max_tokens": 8, "seed": 1, "settings": None}

    def ask(name: str) -> asyncio.Task[Answer]:
        asked = scene.requests.sample(name, {"prompt_token_ids": [5]}, lambda **own: SamplingParams(**own, stop=["eight"]), **given)
        return asyncio.create_task(asked)

    task, other = ask("a"), ask("b")
    await settle()
    scene.core.put(output(scene.name(0), [7], cached=0))
    scene.core.put(output(scene.name(0), [6, 8, 9, 9]))
    answer = await task
    assert (answer.token_ids, answer.logprobs, answer.versions) == ([7, 6, 8], [-7.0, -6.0, -8.0], [0, 0, 0])
    assert str(answer.finish_reason) == "stop"
    assert scene.core.aborted == [scene.name(0)]
    scene.core.put(output(scene.name(1), [7, 1], ends="STOP", cached=0))
    assert (await other).token_ids == [7, 1]
    assert [each.stopped for each in looks] == [False, True]  # by an end token, whose text is no part of the answer's


async def test_a_core_that_is_gone_fails_every_request() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    scene = Scene()
    waiting = [await scene.ask("a"), await scene.ask("b")]
    scene.core.steps.put_nowait(EngineDeadError("out of memory"))
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, EngineDeadError) and "out of memory" in str(result) for result in results)
    assert scene.core.aborted == []
    with pytest.raises(EngineDeadError):
        await (await scene.ask("c"))
    assert len(scene.core.requests) == 2


async def test_outputs_that_cannot_be_read_fail_every_request(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    waiting = await scene.ask("a")
    scene.core.put(version="main")
    with pytest.raises(ValueError, match="main"):
        await waiting
    assert "cannot be read" in caplog.text
    assert isinstance(scene.requests.error, ValueError)


async def test_closing_fails_every_request_and_ends_the_task() -> None:
    scene = Scene()
    waiting = await scene.ask("a")
    scene.requests.close(RuntimeError("it was closed"))
    with pytest.raises(RuntimeError, match="it was closed"):
        await waiting
    await settle()
    assert scene.requests._reader is not None
    assert scene.requests._reader.cancelled()
