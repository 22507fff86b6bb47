"""Joining a cluster that others started: whether it answers, and what its machines need from this one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from agentrl.cluster.processes import ClusterPlan
from agentrl.core.errors import ConfigError
from agentrl.core.files import owned_directory, remove_abandoned

FLAG = "--ray-address"
ANSWER_TIMEOUT_S = 15.0
"""Seconds that a cluster has for its answer; Ray itself would go on asking for minutes."""
IMPORT_TIMEOUT_S = 180.0
"""Seconds that importing Ray may take before the cluster is asked: minutes on a cold shared file system."""

_ASK = """
import sys, ray
from ray._private import services
print("imported", flush=True)
print("asked", address := services.canonicalize_bootstrap_address(sys.argv[1]), flush=True)
nodes = ray._raylet.GcsClient(address=address).get_all_node_info()
print("answered", ray.__version__, flush=True)
"""

_NOBODY = "Start Ray there (ray start --head --port 6379), or give the address that `ray start` printed."
_REFUSED = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) here as on the cluster; see docs/cluster.md."


async def find_cluster(address: str) -> str:
    """Return the address in the form ``host:port`` once the cluster there has answered.

    A process of its own asks, because Ray's client can neither be given a deadline nor interrupted.

    Raises:
        ConfigError: If nobody listens there, the cluster refuses this machine, or there is no answer in time.
    """
    if address.startswith("ray://"):
        problem = "is the address of a Ray client, which cannot start actors that this process steers"
        raise ConfigError(FLAG, address, problem, "Run on a machine of the cluster, or use `ray job submit`, with host:6379 or auto.")
    # A wrong address is answered at once, before another Python imports Ray.
    if address != "auto" and not await _listens(address):
        raise ConfigError(FLAG, address, "nobody listens there", _NOBODY)
    words = [sys.executable, "-c", _ASK, address]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    said, complaint = b"", b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                await cast("asyncio.StreamReader", process.stdout).readline()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                said, complaint = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
    if b"answered" in said:
        return said.split()[1].decode()
    raise _no_answer(address, complaint.decode(errors="replace"))


async def _listens(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(FLAG, address, "is not of the form host:port", "Give the address that `ray start` printed, or auto.")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _no_answer(address: str, complaint: str) -> ConfigError:
    last = next((line.strip() for line in reversed(complaint.splitlines()) if line.strip()), "")
    if any(word in complaint for word in ("uthenticat", "token")):
        return ConfigError(FLAG, address, f"the cluster refuses this machine: {last}", _REFUSED)
    if "ConnectionError" in last and address == "auto":
        return ConfigError(FLAG, address, "no running cluster was found on this machine", _NOBODY)
    if last:
        return ConfigError(
            FLAG, address, f"the cluster cannot be joined: {last}", "The cluster's Ray and Python have to be the same as here."
        )
    problem = f"something listens there, and does not answer as a Ray cluster within {ANSWER_TIMEOUT_S:g} s"
    return ConfigError(FLAG, address, problem, "Check the port (6379 by default) and that its Ray has the same version.")


TRAVELS = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "VLLM_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_LAUNCH_BLOCKING",
    "TMPDIR",
    "AWS_",
    "FSSPEC_",
)
"""Beginnings of the environment variables that processes of a joined cluster are given too."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIAL")
"""Parts of names of variables that stay here, because everybody who may look at a cluster may look at the variables of its actors.

The address of a proxy with a user in it stays as well.
"""


def traveling_environment(always: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that actors on a joined cluster start with: what they `always` have, and the user's that matter."""
    own = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(TRAVELS) or (name in PROXIES and "@" not in value)) and not any(part in name.upper() for part in SECRET)
    }
    return {**own, **always}


MAX_FILE = 2**20
MAX_FOLDER = 16 * 2**20
"""Bytes of one file beside the user's, and of all of them; what is larger stays, and has to be on a path that all machines share."""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """The user's files, of which an actor on a joined cluster is told."""

    folders: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    """Absolute path of a folder on the driver's machine -> relative name of a file -> its bytes."""

    def settled(self, plan: ClusterPlan) -> ClusterPlan:
        """Return the plan with paths of this machine; files that differ or are not here go to a folder of this process."""
        places = {folder: _place(folder, files) for folder, files in self.folders.items()}
        return plan.with_files(lambda file: str(Path(places.get(str(file.parent), file.parent)) / file.name))


_held: list[int] = []
"""Locks of the folders that this process has written; they are released with the process."""


def _place(folder: str, files: Mapping[str, bytes]) -> str:
    here = Path(folder)
    with contextlib.suppress(OSError):
        if all((here / name).read_bytes() == content for name, content in files.items()):
            return folder
    root = Path(tempfile.gettempdir())
    remove_abandoned(root)
    own, lock = owned_directory(root)
    _held.append(lock)
    for name, content in files.items():
        target = own / here.name / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return str(own / here.name)


def pack(plan: ClusterPlan) -> tuple[ClusterPlan, Site]:
    """Return the plan with absolute paths of the user's files, and these files."""
    folders: dict[str, Mapping[str, bytes]] = {}

    def note(file: Path) -> str:
        file = file.expanduser().absolute()
        folders.setdefault(str(file.parent), _files_beside(file))
        if file.name not in folders[str(file.parent)]:
            folders[str(file.parent)] = {**folders[str(file.parent)], file.name: file.read_bytes()}
        return str(file)

    return plan.with_files(note), Site(folders)


def _files_beside(file: Path) -> dict[str, bytes]:
    """Return the small files of its folder and the Python files of packages in it, as long as there are not too many."""
    found: dict[str, bytes] = {file.name: file.read_bytes()}
    packages = (path for init in sorted(file.parent.glob("*/__init__.py")) for path in sorted(init.parent.rglob("*.py")))
    plain = sorted(file.parent.glob("*"), key=lambda path: (path.suffix != ".py", path.name))
    left = MAX_FOLDER
    for path in (*(path for path in plain if path.is_file() and not path.name.startswith(".")), *packages):
        size = path.stat().st_size
        if size <= MAX_FILE and size <= left:
            left -= size
            found[path.relative_to(file.parent).as_posix()] = path.read_bytes()
    return found


async def check_paths(
    plan: ClusterPlan, run_dir: Path | None, workers: Mapping[str, Any], ranks: Mapping[str, Any], front_ends: Mapping[str, Any]
) -> None:
    """Let every actor look for the paths that it will need; the actors come by name, and `plan` is the one that they were given.

    `workers` have engines; `front_ends` have none, and read no weights.

    Raises:
        ConfigError: If one does not have a path; the message names flag, actor and machine.
    """
    model = plan.episodes.model.model
    if Path(model).is_absolute():
        remedy = "Put the model at the same place on every machine, or name one of the hub."
        await all_have({**workers, **front_ends, **ranks}, "--model", model, model, remedy)
    if not ranks:
        return
    if run_dir is not None:
        remedy = "Name a folder that all machines share: the learner ranks write checkpoints and models there."
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=run_dir) as probe:
            await all_have(ranks, "--run-dir", str(run_dir), probe.name, remedy)
    if plan.weights.weight_transport == "disk" and run_dir is not None:
        remedy = "Name a folder that all machines share: with --weight-transport disk, engines read weights there."
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=run_dir) as probe:
            await all_have(workers, "--run-dir", str(run_dir), probe.name, remedy)
    elif not plan.joint:
        first = next(iter(ranks.values()))
        remedy = "Weights go through shared memory here: use --weight-transport disk and a shared --run-dir, or raylets of one machine."
        try:
            await all_have(workers, FLAG, plan.run.ray_address, await first.in_memory.remote(), remedy)
        finally:
            # The second call removes the file that the first one made.
            await first.in_memory.remote()


async def all_have(actors: Mapping[str, Any], flag: str, value: str, path: str, remedy: str) -> None:
    """Let actors look for a path that a flag names by a value.

    Raises:
        ConfigError: If one does not have it.
    """
    found = await asyncio.gather(*(actor.missing.remote([path]) for actor in actors.values()))
    for name, (host, missing) in zip(actors, found, strict=True):
        if missing:
            raise ConfigError(flag, value, f"{name} on {host} does not see {path}", remedy)
