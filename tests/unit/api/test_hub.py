"""Uploading a model with the real client, to a hub of our own on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from agentrl.api.hub import check_hub, push_model
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError, RemoteError
from agentrl.resolve.commands import load_config
from agentrl.track.plan import RecordConfig

TOKEN = "hf_" + "a" * 20
CONFIG = replace(TrainConfig(), record=RecordConfig(push_to_hub="me/first"))


class Hub(BaseHTTPRequestHandler):
    """The few routes that the client asks for when files go into the commit itself."""

    calls: list[str]
    files: dict[str, str]
    repositories: dict[str, bool]

    def answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.calls.append(f"GET {self.path}")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/whoami-v2":
            self.answer({"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        elif self.path.startswith("/api/models/") and self.path.removeprefix("/api/models/").split("/revision")[0] in self.repositories:
            self.answer({"id": "me/first", "sha": "1" * 40, "siblings": []})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def do_POST(self) -> None:
        self.calls.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            self.repositories[f"{asked.get('organization', 'me')}/{asked['name']}"] = asked.get(
                "private", asked.get("visibility") == "private"
            )
            self.answer({"url": f"http://{self.headers['Host']}/me/first", "name": "me/first"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"]).decode()
            self.answer({"commitUrl": f"http://{self.headers['Host']}/me/first/commit/1", "commitOid": "1" * 40, "success": True})

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OwnHub", (Hub,), {"calls": [], "files": {}, "repositories": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield kind
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "README.md", "manifest.json"):
        (tmp_path / name).write_text(f"text of {name}" if name != "README.md" else "---\ntags: [agentrl]\n---\n# first\n")
    return tmp_path


def test_a_model_is_uploaded_into_a_private_repository(hub: type[Hub], model: Path) -> None:
    check_hub(CONFIG.record.push_to_hub)
    address = push_model(model, "me/first")
    assert address == f"{constants.ENDPOINT}/me/first"
    assert hub.repositories == {"me/first": True}
    assert hub.files == {"config.json": "text of config.json", "README.md": "---\ntags: [agentrl]\n---\n# first\n"}
    push_model(model, "me/first")
    assert sum(call == "POST /api/repos/create" for call in hub.calls) == 1


def test_a_token_that_the_hub_refuses_is_said_before_the_run(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="--push-to-hub = 'me/first': the hub does not accept the token"):
        check_hub(CONFIG.record.push_to_hub)


def test_a_missing_token_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="needs a token"):
        check_hub(CONFIG.record.push_to_hub)


def test_a_run_that_uploads_nothing_asks_no_hub(hub: type[Hub]) -> None:
    check_hub("")
    assert hub.calls == []


def test_an_upload_that_fails_says_how_to_do_it_later(hub: type[Hub], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RemoteError, match=r"was not uploaded: .*`hf upload me/first "):
        push_model(model, "me/first")


@pytest.mark.parametrize(
    ("words", "message"), [(["mine"], "is not ORGANISATION/NAME"), (["me/first", "--no-save-model"], "needs the model")]
)
def test_settings_that_cannot_work(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--agent", "m:X", "--push-to-hub", *words])
