"""The JSON client against servers that fail, lie, drip and flood."""

import asyncio
import gzip
import pickle
import time
import tracemalloc
from dataclasses import replace
from email.utils import formatdate
from typing import Any

import pytest

from agentrl.core.errors import ConfigError, RemoteError
from agentrl.env.remote.http import HttpLimits, JsonClient
from agentrl.env.remote.wire import check_url, parse_json, retry_after_s
from tests.servers import Handler, Request, serve

pytestmark = pytest.mark.anyio

LIMITS = HttpLimits(timeout_s=30.0, attempt_timeout_s=20.0, attempts=4, backoff_s=0.01, max_backoff_s=0.05)
HASTY = replace(LIMITS, timeout_s=1.0, attempt_timeout_s=0.4)
HEAD = b"HTTP/1.1 200 X\r\nContent-Length: 100000\r\n\r\n"


async def post(*urls: str, limits: HttpLimits = LIMITS, body: Any = None) -> Any:
    client = JsonClient(urls, limits)
    try:
        return await client.post(body)
    finally:
        await client.aclose()


async def failure(handler: Handler, limits: HttpLimits = LIMITS) -> tuple[RemoteError, int, float]:
    """The error, the number of requests, and the seconds that it took."""
    async with serve(handler) as server:
        start = time.monotonic()
        with pytest.raises(RemoteError) as caught:
            await post(server.url, limits=limits)
        return caught.value, len(server.requests), time.monotonic() - start


def script(*answers: Any) -> Handler:
    """Statuses, each with its headers, one after another and the last one for ever."""
    left = list(answers)

    async def handler(request: Request) -> None:
        answer = left.pop(0) if len(left) > 1 else left[0]
        status, headers = answer if isinstance(answer, tuple) else (answer, {})
        await request.answer({"n": 1}, status=status, **headers)

    return handler


async def test_json_goes_out_and_comes_back() -> None:
    async def echo(request: Request) -> None:
        await request.answer({"got": request.json, "type": request.headers["content-type"]})

    async with serve(echo) as server:
        assert await post(server.url + "/", body={"a": [1, None, "\ud800é"]}) == {
            "got": {"a": [1, None, "\ud800é"]},
            "type": "application/json",
        }


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_busy_or_broken_server_is_tried_again(status: int) -> None:
    async with serve(script(status, status, 200)) as server:
        assert await post(server.url) == {"n": 1}
        assert len(server.requests) == 3


async def test_attempts_are_bounded() -> None:
    error, requests, _ = await failure(script(503))
    assert requests == LIMITS.attempts
    assert error.infrastructure
    assert "answered 503" in str(error)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 418, 422, 501])
async def test_other_refusals_are_final(status: int) -> None:
    error, requests, _ = await failure(script(status))
    assert (requests, error.infrastructure) == (1, False)
    assert f'answered {status}: {{"n": 1}}' in str(error)


async def test_a_redirect_is_not_followed() -> None:
    async with serve(script(200)) as secret:
        error, requests, _ = await failure(script((307, {"Location": secret.url})))
        assert (requests, error.infrastructure, secret.requests) == (1, False, [])
        assert "redirects are not followed" in str(error)


async def test_retry_after_is_honoured() -> None:
    async with serve(script((429, {"Retry_After": "1"}), 200)) as server:
        start = time.monotonic()
        await post(server.url)
        assert 1.0 <= time.monotonic() - start < 5.0


async def test_another_server_is_asked_while_one_wants_to_be_left_alone() -> None:
    async with serve(script((503, {"Retry_After": "60"}))) as busy, serve(script(200)) as free:
        client = JsonClient([busy.url, free.url], LIMITS)
        for _ in range(4):
            assert await client.post(None) == {"n": 1}
        await client.aclose()
        assert (len(busy.requests), len(free.requests)) == (1, 4)


async def test_a_wait_longer_than_the_deadline_fails_at_once() -> None:
    error, requests, seconds = await failure(script((503, {"Retry_After": "3600"})))
    assert (requests, seconds < 5) == (1, True)
    assert "asks to wait 3600 s" in str(error)


async def test_servers_take_turns() -> None:
    async with serve(script(200)) as one, serve(script(200)) as two:
        client = JsonClient([one.url, two.url], LIMITS)
        for _ in range(6):
            await client.post(None)
        await client.aclose()
        assert (len(one.requests), len(two.requests)) == (3, 3)
        assert (one.connections, two.connections) == (1, 1)


async def test_a_dead_server_is_passed_over() -> None:
    async with serve(script(200)) as gone:
        dead = gone.url
    async with serve(script(200)) as alive:
        assert await post(dead, alive.url) == {"n": 1}
    with pytest.raises(RemoteError, match=r"no usable answer in 4 attempts; last: .*ConnectError"):
        await post(dead)


async def test_a_silent_server_ends_at_the_deadline() -> None:
    async def silent(request: Request) -> None:
        await asyncio.sleep(60)

    error, requests, seconds = await failure(silent, HASTY)
    assert seconds < HASTY.timeout_s + 1
    assert requests > 1
    assert "no usable answer within 1 s" in str(error)


async def test_a_dripping_server_ends_at_the_deadline() -> None:
    async def drip(request: Request) -> None:
        await request.send(HEAD)
        while True:
            await request.send(b" ")
            await asyncio.sleep(0.05)

    error, _, seconds = await failure(drip, HASTY)
    assert error.infrastructure
    assert seconds < HASTY.timeout_s + 1


def flood(piece: bytes) -> Handler:
    async def handler(request: Request) -> None:
        await request.send(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await request.send(b"%x\r\n%s\r\n" % (len(piece), piece))

    return handler


def whole(body: bytes, **headers: str) -> Handler:
    async def handler(request: Request) -> None:
        await request.answer(body=body, **headers)

    return handler


BOMB = gzip.compress(bytes(200_000_000), 9)
LIES = {
    "gzip bomb": (whole(BOMB, Content_Encoding="gzip"), "larger than 524288 bytes"),
    "gzip bomb in an error": (whole(BOMB, Content_Encoding="gzip"), "larger than"),
    "endless": (flood(b"[0," * 10_000), "larger than"),
    "deep": (whole(b"[" * 100_000 + b"]" * 100_000), "nested deeper than 32 levels"),
    "a little too deep": (whole(b"[" * 40 + b"]" * 40), "nested deeper than 32 levels"),
    "wide": (whole(b"[" + b"{}," * 170_000 + b"{}]"), ""),
    "NaN": (whole(b'{"rewards": [NaN]}'), "NaN is no number"),
    "infinity": (whole(b'{"rewards": [-Infinity]}'), "Infinity is no number"),
    "overflow": (whole(b'{"rewards": [1e999]}'), "too large a number"),
    "digits": (whole(b"1" * 10_000), "not JSON"),
    "empty": (whole(b""), "not JSON"),
    "html": (whole(b"<html>"), "not JSON"),
    "not UTF-8": (whole(b'"\xff\xfe'), "not JSON"),
    "not gzip": (whole(b"{}", Content_Encoding="gzip"), "is not gzip"),
    "other encoding": (whole(b"{}", Content_Encoding="br"), "compressed with 'br'"),
}


@pytest.mark.parametrize("name", LIES)
async def test_an_answer_that_cannot_be_used(name: str) -> None:
    handler, expected = LIES[name]
    async with serve(handler) as server:
        client = JsonClient([server.url], LIMITS)
        tracemalloc.start()
        start = time.monotonic()
        try:
            if expected:
                with pytest.raises(RemoteError, match=expected) as caught:
                    await client.post(None)
                assert not caught.value.infrastructure
                assert len(server.requests) == 1
            else:
                assert len(await client.post(None)) == 170_001
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
            assert time.monotonic() - start < 5
        finally:
            tracemalloc.stop()
            await client.aclose()


async def test_an_error_page_is_quoted_in_part() -> None:
    async def handler(request: Request) -> None:
        await request.answer(body=gzip.compress(b"\x1b[31mno such model\n" + bytes(10_000_000)), status=404, Content_Encoding="gzip")

    error, _, _ = await failure(handler)
    assert str(error).endswith("answered 404: [31mno such model")


async def test_a_connection_that_breaks_is_tried_again() -> None:
    count = 0

    async def breaks(request: Request) -> None:
        nonlocal count
        count += 1
        if count == 1:
            await request.send(HEAD + b"[1,")
            raise EOFError
        await request.answer([1])

    async with serve(breaks) as server:
        assert await post(server.url) == [1]


async def test_cookies_of_one_call_do_not_reach_another() -> None:
    async with serve(script((200, {"Set_Cookie": "session=1"}))) as server:
        client = JsonClient([server.url], LIMITS)
        await client.post(None)
        await client.post(None)
        await client.aclose()
        assert all("cookie" not in request.headers for request in server.requests)


async def test_a_request_that_json_cannot_say() -> None:
    for body in (float("nan"), object(), {"a": {1}}):
        with pytest.raises(RemoteError, match="cannot be written as JSON"):
            await post("http://127.0.0.1:1", body=body)


async def test_cancelling_a_call_leaves_nothing_running() -> None:
    async def silent(request: Request) -> None:
        await asyncio.sleep(60)

    async with serve(silent) as server:
        client = JsonClient([server.url], LIMITS)
        call = asyncio.create_task(client.post(None))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.aclose()


def test_addresses() -> None:
    assert check_url(" http://host:80/a/ ") == "http://host:80/a"
    for url in ("", "host:80", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(ConfigError, match="is not the address of a server"):
            check_url(url)
    with pytest.raises(ConfigError) as caught:
        check_url("http://user:hidden@host")
    assert "hidden" not in str(caught.value)


def test_retry_after() -> None:
    assert retry_after_s("7") == 7
    assert 50 < retry_after_s(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after_s(formatdate(time.time() - 60, usegmt=True)) == 0
    assert [retry_after_s(text) for text in ("-1", "soon", "", "9" * 400, "nan")] == [0] * 5


def test_depth_counts_lists_and_objects() -> None:
    assert parse_json(b'{"a": [{"b": 1}]}', "x", 3) == {"a": [{"b": 1}]}
    with pytest.raises(RemoteError):
        parse_json(b'{"a": [{"b": 1}]}', "x", 2)


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RemoteError("m", infrastructure=False)))
    assert (str(error), error.infrastructure) == ("m", False)
