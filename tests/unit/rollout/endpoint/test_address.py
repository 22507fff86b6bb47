"""Where the endpoint listens, what agents are told of it, and connections that lead nowhere."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl import ModelEndpoint, Task
from agentrl.config.endpoint_rules import ENDPOINT_RULES
from agentrl.core import serving
from agentrl.core.errors import ConfigError
from agentrl.core.process import LOOPBACK, own_address
from agentrl.core.serving import Address
from agentrl.rollout.endpoint.server import EndpointServer
from agentrl.rollout.plan import EndpointConfig
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.endpoint.support import Stage, agent, caller, play_one, says, user

pytestmark = pytest.mark.anyio

PART = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
BODY = {"model": "m", "messages": [user("one")]}


async def play_at(run: Any, **settings: Any) -> Any:
    """Play an episode on a server with these settings of its address."""
    stage = Stage(agent(run), ScriptedEngine(answer=says("three"), max_model_len=4096))
    await stage.engine.start()
    server = EndpointServer(EndpointConfig(**settings))
    try:
        (trajectory,) = await stage.play(server)
    finally:
        await server.close()
    return trajectory


def check(**settings: Any) -> None:
    for rule in ENDPOINT_RULES:
        rule(EndpointConfig(**settings))


async def asks(task: Task, llm: ModelEndpoint) -> float:
    async with llm.openai() as client:
        await client.chat.completions.create(**BODY)
    return 1.0


async def test_agents_elsewhere_are_told_the_address_of_the_machine() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        told.append(llm.root)
        async with httpx.AsyncClient(base_url=llm.base_url, trust_env=False) as client:
            assert (await client.get("models")).status_code == 401
            assert (await client.post("chat/completions", json=BODY)).status_code == 401
        return await asks(task, llm)

    told: list[str] = []
    trajectory = await play_at(run, endpoint_host="0.0.0.0")
    assert trajectory.error is None
    assert told[0].startswith(f"http://{own_address()}:")


async def test_an_address_behind_a_proxy_is_told_with_the_port_of_the_worker() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        told.append((llm.base_url, llm.anthropic_base_url, llm.env()["OPENAI_BASE_URL"]))
        port = llm.root.rpartition("/")[2]
        async with httpx.AsyncClient(headers={"x-api-key": llm.api_key}, trust_env=False) as client:  # as the proxy passes it on
            answer = await client.post(f"http://{LOOPBACK}:{port}/agents/{port}/v1/chat/completions", json=BODY)
            assert answer.status_code == 200
        return 1.0

    told: list[tuple[str, ...]] = []
    trajectory = await play_at(run, endpoint_url="https://train.example.com/agents/{port}")
    assert trajectory.error is None
    base_url, anthropic_base_url, variable = told[0]
    assert base_url == variable == f"{anthropic_base_url}/v1"
    assert anthropic_base_url.startswith("https://train.example.com/agents/")


def test_the_workers_of_a_machine_take_ports_one_after_another() -> None:
    with Address().listen() as first:
        port = first.getsockname()[1]
        with Address(ports=range(port, port + 50)).listen() as second:
            assert port < second.getsockname()[1] < port + 50
        with pytest.raises(OSError, match="in use"):
            Address(ports=(port,)).listen()


async def test_an_address_that_cannot_be_used_is_named() -> None:
    stage = Stage(agent(asks), ScriptedEngine(answer=says("three")))
    await stage.engine.start()
    with pytest.raises(ConfigError, match=r"--endpoint-port = 0: cannot be used at 192\.0\.2\.7"):
        await stage.play(EndpointServer(EndpointConfig(endpoint_host="192.0.2.7")))


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    """A file with a certificate of 127.0.0.1 and its private key."""
    both = tmp_path / "both.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=agentrl"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", f"{both}", "-keyout", f"{tmp_path}/key.pem"]
    subprocess.run(words, check=True, capture_output=True)
    both.write_text(both.read_text() + (tmp_path / "key.pem").read_text())
    return str(both)


async def test_https_with_a_certificate(certificate: str) -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        assert llm.root.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=certificate)
        async with caller(llm, verify=context) as client:
            assert (await client.post("chat/completions", json=BODY)).status_code == 200
        return await asks(task, llm)

    trajectory = await play_at(run, endpoint_certificate=certificate)
    assert (trajectory.error, len(trajectory.turns)) == (None, 2)


async def test_the_list_of_models_has_the_length_of_a_context() -> None:
    async def run(task: Task, llm: ModelEndpoint) -> float:
        async with caller(llm) as client:
            cards = [(await client.get("models")).json()["data"][0], (await client.get("models/any")).json()]
            assert [card["max_model_len"] for card in cards] == [512, 512]
        return await asks(task, llm)

    _, trajectory = await play_one(run, "three", max_model_len=512)
    assert trajectory.error is None


@pytest.mark.row(22, "a connection on which no request arrives, or a part of one: {sent}, after another request: {after_another}")
@pytest.mark.parametrize(("sent", "after_another"), [("", False), (PART, False), (PART, True)])
async def test_half_open_connections_end(sent: str, after_another: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 0.3)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        host, port = llm.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        if after_another:
            writer.write(f"HEAD / HTTP/1.1\r\nHost: a\r\nx-api-key: {llm.api_key}\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(sent.encode())
        start = time.monotonic()
        assert await asyncio.wait_for(reader.read(), 20) == b""
        took.append(time.monotonic() - start)
        writer.close()
        return await asks(task, llm)

    took: list[float] = []
    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None
    assert 0.2 < took[0] < 10


async def test_a_body_that_stops_is_refused_in_the_form_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_S", 0.3)

    async def run(task: Task, llm: ModelEndpoint) -> float:
        host, port = llm.root.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nx-api-key: {llm.api_key}\r\ncontent-length: 99\r\n\r\n{{".encode())
        answered = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert answered.startswith(b"HTTP/1.1 408")
        assert b'{"type": "error", "error": {"type": "invalid_request_error"' in answered
        writer.close()
        return await asks(task, llm)

    _, trajectory = await play_one(run, "three")
    assert trajectory.error is None


def test_a_peer_that_is_gone_counts_as_closed_after_half_a_minute() -> None:
    with Address().listen() as listener:
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        idle_s, every_s, tries = (listener.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert (idle_s + every_s * tries, listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == (30, 1)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"endpoint_host": "::"}, r"--endpoint-host = '::': is neither an IPv4 address"),
        ({"endpoint_url": "train.example.com"}, r"--endpoint-url = .* begins with http:// or https://"),
        ({"endpoint_url": "http://{name}"}, r"--endpoint-url = .* has the unknown field 'name'"),
        ({"endpoint_url": "http://{host"}, r"--endpoint-url = .* cannot be filled in"),
        ({"endpoint_certificate": "/no/such.pem"}, r"--endpoint-certificate = .* no such file"),
    ],
)
def test_settings_that_lead_nowhere_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(**settings)


def test_an_address_that_leads_somewhere_is_taken() -> None:
    check(endpoint_host="0.0.0.0", endpoint_url="https://{host}:{port}/a")
