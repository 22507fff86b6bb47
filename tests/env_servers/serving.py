"""Runs an application on a free port of loopback, and says which. Imports nothing of this project's, so that any Python can run it."""

import socket
from typing import Any

import uvicorn


def serve(app: Any) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    print("port", listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error", ws_max_size=2**20)).run(sockets=[listener])
