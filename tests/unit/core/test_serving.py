"""The server on loopback that endpoints, reward servers and the viewer share."""

from __future__ import annotations

import socket

import httpx
import pytest

from agentrl.core.serving import LoopbackServer


@pytest.mark.anyio
async def test_answers_are_not_held_back_by_nagles_algorithm():
    found = []

    async def app(scope, receive, send):
        state = server._server.server_state
        found.extend(
            item.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for item in state.connections
        )
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    server = LoopbackServer(app, name="test")
    try:
        async with httpx.AsyncClient() as client:
            assert (await client.get(await server.start())).text == "ok"
    finally:
        await server.close()
    assert len(found) == 1
    assert all(found)
