"""Ports for the meeting points of ranks."""

from __future__ import annotations

from agentrl.core.process import LOOPBACK, free_port


def free_ports(count: int) -> list[int]:
    """Return different ports that are free at this moment."""
    ports: list[int] = []
    while len(ports) < count:
        port = free_port(LOOPBACK)
        if port not in ports:
            ports.append(port)
    return ports
