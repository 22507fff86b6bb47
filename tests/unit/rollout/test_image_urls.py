"""Images at addresses: hosts that are named, and no others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.core.errors import ConfigError, EnvResultError
from agentrl.env.images import image_text
from agentrl.env.plan import ImageConfig
from agentrl.rollout import image_urls
from agentrl.rollout.image_urls import ImageFetcher
from agentrl.rollout.images import image_bytes, open_reader
from tests.image_support import picture

PNG = image_bytes(image_text(picture(3)), ImageFetcher(()))
asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked.append(self.path)
        place = {"/away": "http://localhost:1/a.png", "/moved": "/a.png", "/circle": "/circle"}.get(self.path)
        self.send_response(404 if self.path == "/none" else 302 if place else 200)
        if place:
            self.send_header("location", place)
        self.end_headers()
        self.wfile.write(b"" if place else PNG)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="agentrl-test")
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_allowed_image_is_fetched_once_and_is_the_same_as_its_file(host: str, vision_model: str) -> None:
    reader = open_reader(vision_model, ImageConfig(allow_image_urls=(host.upper(),)))
    assert reader is not None
    asked.clear()
    found = reader.read_here([f"http://{host}/a.png", picture(3), f"http://{host}/a.png", f"http://{host}/moved"])
    assert len({id(image) for image in found}) == 1
    assert asked == ["/a.png", "/moved", "/a.png"]


def test_letters_of_hosts_may_be_large_or_small() -> None:
    fetcher = ImageFetcher(["Images.Example.com"])
    assert fetcher.allows("https://images.EXAMPLE.com/a.png")
    assert not fetcher.allows("https://example.com/a.png")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/away", "such as 'http://localhost:1/a.png', to which 'http://127.0.0.1:"),
        ("/circle", "is redirected more than 4 times"),
        ("/none", "cannot be fetched: HTTPStatusError"),
    ],
)
def test_what_the_host_does_not_give_is_refused(host: str, path: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImageFetcher([host]).fetch(f"http://{host}{path}")


@pytest.mark.parametrize(
    "address",
    ["http://HOST/a.png", "http://user@HOST/a.png", "ftp://HOST/a.png", "file:///etc/hostname", "http://HOST.example.com/a.png"],
)
def test_other_hosts_and_schemes_are_never_asked(host: str, vision_model: str, address: str) -> None:
    allowed = () if address == "http://HOST/a.png" else (host,)
    reader = open_reader(vision_model, ImageConfig(allow_image_urls=allowed))
    assert reader is not None
    asked.clear()
    with pytest.raises(EnvResultError, match=r"image 0: images are not fetched from addresses such as .* --allow-image-urls"):
        reader.read_here([address.replace("HOST", host)])
    assert not asked


@pytest.mark.parametrize(("name", "value", "words"), [("MAX_BYTES", 100, "more than 100 bytes"), ("TIMEOUT_S", -1.0, "took longer than")])
def test_size_and_time_of_a_file_are_limited(host: str, monkeypatch: pytest.MonkeyPatch, name: str, value: float, words: str) -> None:
    fetcher = ImageFetcher([host])
    monkeypatch.setattr(image_urls, name, value)
    monkeypatch.setattr("httpx.Client.__init__", _without_timeout(__import__("httpx").Client.__init__))
    with pytest.raises(ValueError, match=words):
        fetcher.fetch(f"http://{host}/a.png")


def _without_timeout(begin: object) -> object:
    """A client whose own timeout does not come before ours."""
    return lambda self, timeout, **options: begin(self, timeout=30.0, **options)  # type: ignore[operator]


@pytest.mark.parametrize("host", ["https://a.b", "a.b/c", "", "me@a.b"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allow-image-urls"):
        ImageConfig(allow_image_urls=(host,))
