"""Sessions of the JSON client: cookies kept apart, what is sent twice and what never, connections shared."""

import asyncio
import contextlib
from typing import Any

import pytest

from agentrl.core.errors import RemoteError
from agentrl.env.remote.http import HttpLimits, HttpSession, JsonClient, SharedClient
from tests.servers import Handler, Request, Server, serve

pytestmark = pytest.mark.anyio

LIMITS = HttpLimits(timeout_s=20.0, attempt_timeout_s=0.5, attempts=3, backoff_s=0.01, max_backoff_s=0.05)


@contextlib.asynccontextmanager
async def client_of(*urls: str) -> Any:
    client = JsonClient(urls, LIMITS)
    try:
        yield client
    finally:
        await client.aclose()


def visitors(server: Server) -> list[str | None]:
    return [request.headers.get("cookie") for request in server.requests]


def naming() -> Handler:
    """Gives every caller without a cookie a new number."""
    count = iter(range(1000))

    async def handler(request: Request) -> None:
        cookie = request.headers.get("cookie") or f"id={next(count)}"
        await request.answer({"you": cookie}, Set_Cookie=f"{cookie}; Path=/; HttpOnly; SameSite=lax")

    return handler


async def test_each_session_has_its_own_cookies_on_shared_connections() -> None:
    async with serve(naming()) as server, client_of(server.url) as client:
        sessions = [HttpSession() for _ in range(20)]

        async def visit(session: HttpSession) -> set[str]:
            return {(await client.call("POST", "/a", {}, session=session)).json()["you"] for _ in range(5)}

        seen = await asyncio.gather(*map(visit, sessions))
        assert all(len(names) == 1 for names in seen)
        assert len(set.union(*seen)) == 20
        assert server.connections <= 20
        before = server.connections
        await client.call("POST", "/a", {})
        assert visitors(server)[-1] is None
        assert server.connections == before


async def test_a_session_stays_with_the_server_that_answered() -> None:
    async with serve(naming()) as one, serve(naming()) as two, client_of(one.url, two.url) as client:
        first, second = HttpSession(), HttpSession()
        for _ in range(3):
            await client.call("POST", "/", {}, session=first)
            await client.call("POST", "/", {}, session=second)
        assert visitors(one) == visitors(two) == [None, "id=0", "id=0"]


async def test_too_many_cookies() -> None:
    async def handler(request: Request) -> None:
        await request.answer({}, Set_Cookie=f"n{len(server.requests)}={'x' * 3000}")

    async with serve(handler) as server, client_of(server.url) as client:
        session = HttpSession()
        for _ in range(5):
            await client.call("POST", "/", {}, session=session)
        with pytest.raises(RemoteError, match="more cookies than are kept"):
            await client.call("POST", "/", {}, session=session)


async def cuts(request: Request) -> None:
    raise EOFError


async def silent(request: Request) -> None:
    await asyncio.sleep(30)


def status(code: int) -> Handler:
    async def handler(request: Request) -> None:
        await request.answer({"detail": "no"}, status=code)

    return handler


@pytest.mark.parametrize(
    ("handler", "requests"), [(cuts, 1), (silent, 1), (status(500), 1), (status(502), 1), (status(503), 3), (status(429), 3)]
)
async def test_what_the_server_may_have_done_is_not_sent_again(handler: Handler, requests: int) -> None:
    async with serve(handler) as server, client_of(server.url) as client:
        with pytest.raises(RemoteError) as caught:
            await client.call("POST", "/tool", {}, repeat=False)
        assert len(server.requests) == requests
        assert caught.value.infrastructure


@pytest.mark.parametrize("handler", [cuts, status(500), status(502)])
async def test_what_may_be_repeated_is_sent_again(handler: Handler) -> None:
    async with serve(handler) as server, client_of(server.url) as client:
        with pytest.raises(RemoteError):
            await client.call("POST", "/seed", {})
        assert len(server.requests) == 3


async def test_a_session_ends_when_its_server_is_gone() -> None:
    async with serve(naming()) as server, client_of(server.url) as client:
        session = HttpSession()
        await client.call("POST", "/", {}, session=session)
        await asyncio.sleep(0)
        url = server.url
    async with client_of(url) as client:
        start = asyncio.get_running_loop().time()
        with pytest.raises(RemoteError, match="ConnectError") as caught:
            await client.call("POST", "/tool", {}, session=session)
        assert "no usable answer" not in str(caught.value)
        assert asyncio.get_running_loop().time() - start < 5


async def test_answers_that_are_no_failure() -> None:
    async with serve(status(422)) as server, client_of(server.url) as client:
        reply = await client.call("POST", "/tool", {}, told=(422,))
        assert (reply.status, reply.json()) == (422, {"detail": "no"})
        with pytest.raises(RemoteError, match="answered 422"):
            await client.call("POST", "/tool", {}, told=(404,))


async def test_any_method() -> None:
    async with serve(status(200)) as server, client_of(server.url) as client:
        await client.call("GET", "/schema")
        await client.call("DELETE", "/x", {"a": 1})
        assert [(request.path, request.body) for request in server.requests] == [("/schema", b""), ("/x", b'{"a":1}')]


async def test_a_shared_client_is_closed_by_the_last_user() -> None:
    made: list[JsonClient] = []

    def make() -> JsonClient:
        made.append(JsonClient([server.url], LIMITS))
        return made[-1]

    async with serve(status(200)) as server:
        shared = SharedClient(make)
        assert shared.open() is shared.open()
        await shared.close()
        await made[0].call("GET", "/")
        await shared.close()
        with pytest.raises(RuntimeError):
            await made[0].call("GET", "/")
        shared.open()
        assert len(made) == 2
        await shared.close()
