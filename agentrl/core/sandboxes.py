"""Programs that hold sandboxes, named where settings are checked and where they are used."""

BUBBLEWRAP = "bwrap"
BUBBLEWRAP_REMEDY = "Install bubblewrap 0.8 or later (apt-get install bubblewrap), or run programs without a wall: --sandbox none"
CONTAINERS = ("podman", "docker")
CONTAINERS_REMEDY = "Install podman (apt-get install podman) or docker (apt-get install docker.io), or choose --sandbox local"
KEY = "AGENTRL_SANDBOX_KEY"
"""Environment variable with the key that a server of sandboxes asks for, and a client gives."""
DEFAULT_IMAGE = "docker.io/library/python:3.12-slim-bookworm"
"""Image of containers for which none is named: it has Python, and little else."""
