"""Rules of the endpoint's address: what agents are told must lead to what listens."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.rollout.plan import EndpointConfig

FIELDS = ("host", "port")


def _host_can_be_bound(endpoint: EndpointConfig) -> None:
    host = endpoint.endpoint_host
    if not host or ":" in host or "/" in host:
        problem = "is neither an IPv4 address of this machine nor its name"
        raise ConfigError("--endpoint-host", host, problem, "Use 127.0.0.1, 0.0.0.0 for every address, or one address.")


def _url_is_an_address(endpoint: EndpointConfig) -> None:
    url = endpoint.endpoint_url
    if not url:
        return
    remedy = "Write for example http://{host}:{port}, or https://train.example.com/agents/{port}."
    if not url.startswith(("http://", "https://")) or any(letter.isspace() for letter in url):
        raise ConfigError("--endpoint-url", url, "is no address that begins with http:// or https://", remedy)
    try:
        strange = [name for _, name, form, _ in string.Formatter().parse(url) if name is not None and (name not in FIELDS or form)]
    except ValueError as error:
        raise ConfigError("--endpoint-url", url, f"cannot be filled in: {error}", remedy) from error
    if strange:
        raise ConfigError("--endpoint-url", url, f"has the unknown field {strange[0]!r}", remedy)


def _certificate_is_there(endpoint: EndpointConfig) -> None:
    file = endpoint.endpoint_certificate
    if file and not Path(file).is_file():
        raise ConfigError("--endpoint-certificate", file, "no such file", "Give a file with a certificate and its private key (PEM).")


ENDPOINT_RULES: tuple[Callable[[EndpointConfig], None], ...] = (_host_can_be_bound, _url_is_an_address, _certificate_is_there)
