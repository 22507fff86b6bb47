"""What bad clients cost the event loop of a rollout worker: huge bodies, deep tools, slow headers, torn streams, many connections.

python -m tests.benchmarks.endpoint_load [CONNECTIONS]

The clients run in a process of their own. Of each kind of load it prints the statuses of the answers, the longest stall of the loop, and
the memory that the process took at most.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl import BlackBoxAgent, ModelEndpoint, Task
from agentrl.assets import tiny_model_path
from agentrl.config.sections import changed
from agentrl.core.process import collect_rarely
from agentrl.core.tokenizers import load_tokenizer
from agentrl.core.types import GroupRequest
from agentrl.env.black_box import BlackBoxSession
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.endpoint.episode import BlackBoxEpisode
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.episode_plan import EpisodePlan
from tests.scripted_engine import ScriptedEngine

SETTINGS = changed(EpisodePlan(), max_new_tokens=32, max_requests=1_000_000)
TICK_S = 0.005
MIB = 2**20


class StallMeter:
    """Measures how late the event loop wakes a task that sleeps for a moment, again and again; the longest delay since `begin`.

    Other processes delay it too, on a machine whose processors are all busy. So a delay counts only as far as this process computed, on
    any of its threads, and what the thread of the loop computed of it is kept apart.
    """

    def __init__(self) -> None:
        self.longest_s = self.own_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start, or start anew."""
        self.longest_s = self.own_s = 0.0
        self._task = self._task or asyncio.create_task(self._run())

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            start, cpu, own = clock(), time.process_time(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, min(clock() - start - TICK_S, time.process_time() - cpu))
            self.own_s = max(self.own_s, time.thread_time() - own)


def tools(count: int, fields: int, depth: int = 0) -> list[Any]:
    """Tools with many fields, or with objects within objects."""
    inner: Any = {f"field_{number}": {"type": "string", "description": "text"} for number in range(fields)}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return [{"type": "function", "function": {"name": f"tool_{number}", "parameters": inner}} for number in range(count)]


def body(content: str = "one", **more: Any) -> bytes:
    """The body of a request."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


def nested(count: int, depth: int) -> bytes:
    """A body with tools whose schemas are nested, made without recursion."""
    schema = '{"properties":' * depth + "{}" + "}" * depth
    tool = f'{{"type":"function","function":{{"name":"t","parameters":{schema}}}}}'
    return body(tools=[])[:-3] + b"[" + ",".join([tool] * count).encode() + b"]}"


LOADS: dict[str, tuple[int, Callable[[], bytes], int]] = {
    "nothing": (0, lambda: b"", 0),
    "small requests, 64 at once": (64, body, 4),
    "small requests": (0, body, 2),
    "streams, 64 at once": (64, lambda: body(stream=True), 4),
    "streams": (0, lambda: body(stream=True), 2),
    "100 MB bodies": (20, lambda: b" " * 100 * MIB, 1),
    "31 MB of one text": (2, lambda: body("one two three " * (31 * MIB // 14)), 1),
    "31 MB of blanks": (2, lambda: body(" " * (31 * MIB)), 1),
    "31 MB of line breaks": (4, lambda: body("\n" * (15 * MIB)), 1),
    "31 MB of tools": (4, lambda: body(tools=tools(3000, 180)), 1),
    "31 MB of messages": (4, lambda: json.dumps({"messages": [{"role": "user", "content": "x"}] * 900_000}).encode(), 1),
    "2,000 tools nested 900 deep": (2, lambda: nested(2000, 900), 1),
    "20 tools nested 900 deep": (2, lambda: nested(20, 900), 1),
    "2 MB of text": (4, lambda: body("one two three, " * 140_000), 1),
    "100 kB of tools": (8, lambda: body(tools=tools(100, 15)), 2),
}
"""Kinds of load: connections (0: as many as are asked for), the body, and requests per connection."""


async def _request(port: int, key: str, content: bytes, times: int) -> list[int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    statuses = []
    try:
        for _ in range(times):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: {len(content)}\r\n\r\n"
            sending = asyncio.create_task(_send(writer, head.encode() + content))
            answer = await reader.readuntil(b"\r\n\r\n")
            statuses.append(int(answer.split()[1]))
            sizes = [int(line[15:]) for line in answer.decode().lower().splitlines() if line.startswith("content-length:")]
            await (reader.readexactly(sizes[0]) if sizes else reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n"))
            if statuses[-1] == 413:  # the rest is not wanted
                sending.cancel()
                break
            await sending
    finally:
        writer.transport.abort()
    return statuses


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    view = memoryview(data)
    for start in range(0, len(data), MIB):
        writer.write(view[start : start + MIB])
        await writer.drain()


async def _torn(port: int, key: str, number: int) -> None:
    """A connection that ends in its headers, in its body, or before its answer."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    content = body(stream=True)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    whole = head + content
    writer.write(whole[: (len(head) // 2, len(head) + 5, len(whole))[number % 3]])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()


def _clients(port: int, key: str, name: str, connections: int, pipe: Any) -> None:
    async def run() -> Counter[Any]:
        if name == "torn connections":
            await asyncio.gather(*(_torn(port, key, number) for number in range(connections)))
            return Counter()
        count, make, times = LOADS[name]
        content = make()
        answers = await asyncio.gather(*(_request(port, key, content, times) for _ in range(count or connections)))
        return Counter(status for statuses in answers for status in statuses)

    pipe.send(asyncio.run(run()))


async def load(port: int, key: str, name: str, connections: int) -> Counter[Any]:
    """Put one kind of load on a server from another process; returns the statuses of the answers."""
    if name == "nothing":
        await asyncio.sleep(1.0)
        return Counter()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_clients, args=(port, key, name, connections, there), daemon=True)
    process.start()
    try:
        return await asyncio.to_thread(here.recv)
    finally:
        await asyncio.to_thread(process.join)


def run(names: list[str], connections: int, told: Callable[[str], object] = print) -> dict[str, tuple[Counter[Any], float]]:
    """Return the statuses and the longest stall in seconds of each kind of load."""
    return asyncio.run(_run(names, connections, told))


async def _run(names: list[str], connections: int, told: Callable[[str], object]) -> dict[str, tuple[Counter[Any], float]]:
    collect_rarely()  # as a rollout worker does
    server, found = EndpointServer(), dict[str, tuple[Counter[Any], float]]()

    class Loaded(BlackBoxAgent):
        async def run(self, task: Task, llm: ModelEndpoint) -> float:
            port, meter = int(llm.root.rpartition(":")[2]), StallMeter()
            warm: Awaitable[Any] = _request(port, llm.api_key, body(), 1)
            await warm
            for name in names:
                meter.begin()
                statuses = await load(port, llm.api_key, name, connections)
                found[name] = statuses, meter.longest_s
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                stall = f"longest stall {1000 * meter.longest_s:6.1f} ms, of the loop itself {1000 * meter.own_s:6.1f} ms"
                told(f"{name:32} {dict(statuses)!s:24} {stall}, memory {peak:6.0f} MiB")
            return 1.0

    codec = ChatCodec(load_tokenizer(str(tiny_model_path())))
    engine = ScriptedEngine(answer=lambda request: [*range(20, 40), 1], max_model_len=200_000, delay=lambda request: 0.02, step_s=0.02)
    await engine.start()
    group_request = GroupRequest(group_id=0, task=Task("?", id="t"), n_samples_per_prompt=1, version=0)
    session = BlackBoxSession(Loaded, __file__, SETTINGS.env)
    episode = BlackBoxEpisode(group_request, 0, engine=engine, codec=codec, env=session, settings=SETTINGS, server=server)
    (trajectory,) = await episode.run()
    await server.close()
    assert trajectory.error is None, trajectory.error
    return found


if __name__ == "__main__":
    run([*LOADS, "torn connections"], int(sys.argv[1]) if len(sys.argv) > 1 else 500)
