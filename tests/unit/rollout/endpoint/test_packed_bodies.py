"""Bodies that are packed, and keys in the headers of several services."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pyarrow
import pytest

from agentrl.core.types import Task
from agentrl.env.black_box import ModelEndpoint
from agentrl.rollout.endpoint.desk import MAX_BODY
from tests.unit.rollout.endpoint.support import caller, play_one

pytestmark = pytest.mark.anyio

BODY = {"model": "m", "messages": [{"role": "user", "content": "one"}]}
PLAIN = json.dumps(BODY).encode()


def raw_deflated(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def zstd(body: bytes) -> bytes:
    return bytes(pyarrow.compress(body, codec="zstd", asbytes=True))


async def test_packed_bodies_are_read() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        del task
        async with caller(llm) as client:
            forms = [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflated), ("zstd", zstd), ("identity", bytes)]
            for name, pack in forms:
                answer = await client.post("chat/completions", content=pack(PLAIN), headers={"content-encoding": name})
                assert answer.status_code == 200, (name, answer.text)
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None
    assert len({turn.prompt_ids.tobytes() for turn in trajectory.turns}) == 1  # all of them are the same request


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("br", PLAIN, 415, "content-encoding = 'br': is none of gzip, deflate, zstd"),
        ("gzip, gzip", PLAIN, 415, "is none of"),
        ("gzip", PLAIN, 400, "the body is not packed by gzip, as content-encoding says"),
        ("deflate", PLAIN, 400, "not packed by deflate"),
        ("zstd", PLAIN, 400, "not packed by zstd"),
        ("gzip", gzip.compress(PLAIN)[:-20], 400, "it ends too early"),
        ("gzip", gzip.compress(b" " * (MAX_BODY + 1)), 413, "larger than"),
        ("deflate", zlib.compress(b" " * (4 * MAX_BODY)), 413, "larger than"),
        ("zstd", zstd(b" " * (MAX_BODY + 1)), 413, "larger than"),
    ],
    ids=["br", "twice", "no gzip", "no deflate", "no zstd", "cut", "large gzip", "large deflate", "large zstd"],
)
async def test_what_cannot_be_unpacked_is_refused_by_name(name: str, body: bytes, status: int, said: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        del task
        async with caller(llm) as client:
            answer = await client.post("chat/completions", content=body, headers={"content-encoding": name})
            assert (answer.status_code, said in answer.text) == (status, True), answer.text
            assert (await client.post("chat/completions", json=BODY)).status_code == 200
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "x-goog-api-key"])
async def test_a_key_is_taken_from_the_header_of_each_service(header: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        del task
        async with httpx.AsyncClient(base_url=llm.base_url, trust_env=False) as client:
            nothing = await client.post("chat/completions", json=BODY)
            assert (nothing.status_code, "there is no key in authorization, x-api-key" in nothing.text) == (401, True)
            wrong = await client.post("chat/completions", json=BODY, headers={header: llm.api_key + "x"})
            assert (wrong.status_code, f"the key in {header} is not that of an episode" in wrong.text) == (401, True)
            given = {"authorization": "Bearer of-another-service", header: llm.api_key}
            assert (await client.post("chat/completions", json=BODY, headers=given)).status_code == 200
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None


async def test_an_answer_that_is_named_by_thousands_of_digits_is_none() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        del task
        async with caller(llm) as client:
            first = (await client.post("responses", json={"input": "one"})).json()["id"]
            name = first.rpartition("-")[0] + "-" + "1" * 5000
            answer = await client.post("responses", json={"input": "two", "previous_response_id": name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
        return 1.0

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None
