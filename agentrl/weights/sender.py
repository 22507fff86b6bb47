"""Sending of weights from the learner to engines: the protocol, and the way through shared memory; vLLM is not needed here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from agentrl.core.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from agentrl.core.errors import WeightSyncError
from agentrl.core.files import owned_directory, remove_abandoned
from agentrl.core.operating_system import memory_root
from agentrl.core.protocols import Membership, WeightUpdate
from agentrl.weights.plan import never

NamedTensors: TypeAlias = Iterable[tuple[str, Tensor]]
"""Checkpoint names and tensors; a tensor needs to be valid only until the next one is asked for. It may be gone over more than once."""


class WeightSender(Protocol):
    """Publishes one version after the other; the next `send` comes only after every engine has loaded the last."""

    every_rank: bool  # whether every learner rank calls `send`, or the first alone

    def send(self, named_tensors: NamedTensors, version: int, members: Membership | None = None) -> WeightUpdate | None:
        """Offer the weights, and return how engines get them from this rank, if they do; `members` are engines that take them together.

        Where bytes move only while engines receive, they do so on a thread of the sender, which may read the weights until `settle`.

        Raises:
            WeightSyncError: If the weights cannot be offered, or the version before did not get through.
        """
        ...

    def abandon(self, reason: str) -> None:
        """Give up what is under way, if anything is, and wait for the end of it."""

    def settle(self) -> None:
        """Wait until the weights may be changed, and the ranks may talk to each other about something else.

        Raises:
            WeightSyncError: If engines did not get what was sent last.
        """
        ...

    def close(self) -> None:
        """Release what is held for engines; safe to call twice."""


class SharedMemorySender:
    """Writes each version as one safetensors file into a directory under `root`, which is shared memory if it is not given.

    A file appears under its name only when it is complete. The version before it stays until the one after it is sent,
    for engines that are started again meanwhile, and so does the latest version that `held` names. The directory is
    readable by this user alone, is removed on `close` or at exit, and one that a killed process left behind is removed
    by the next sender.
    """

    every_rank = False

    def __init__(self, root: Path | None = None, held: Callable[[int], bool] = never) -> None:
        self._root, self._held = root or memory_root(), held
        self._directory: Path | None = None
        self._finalizer: weakref.finalize | None = None  # type: ignore[type-arg]

    def send(self, named_tensors: NamedTensors, version: int, members: Membership | None = None) -> WeightUpdate:
        """Write the weights.

        Raises:
            WeightSyncError: If there is no space for them.
        """
        # Copied on a CPU too: a tensor is valid only until the next one is asked for.
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
        directory = self._prepared()
        files = sorted(directory.glob("*.safetensors"))
        held = [file for file in files if self._held(int(file.stem))]
        for old in files[:-1]:
            if old not in held[-1:]:
                old.unlink()
        target = directory / f"{version:012d}.safetensors"
        _write(tensors, target)
        return WeightUpdate(version=version, transport="shm", payload={"update": {"path": str(target)}})

    def abandon(self, reason: str) -> None:
        """Do nothing: no transfer is ever under way."""

    def settle(self) -> None:
        """Engines read the file, so nothing has to be waited for."""

    def close(self) -> None:
        """Remove the directory."""
        if self._finalizer is not None:
            self._finalizer()
        self._directory = None

    def _prepared(self) -> Path:
        if self._directory is None:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self._root)
            self._directory, lock = owned_directory(self._root)
            self._finalizer = weakref.finalize(self, _remove, self._directory, lock)
        return self._directory


class AdapterSender(SharedMemorySender):
    """Writes each version of a low-rank adapter as a directory in the form of peft, which vLLM loads beside the initial model.

    The latest `kept` versions stay, because vLLM may read one again that a request still uses, and so does the latest that `held` names.
    `rank` and `alpha` are those of the adapter, whose scale is ``alpha / rank``, or with `rslora` ``alpha / sqrt(rank)``.
    """

    def __init__(
        self, *, rank: int, alpha: int, kept: int, rslora: bool = False, root: Path | None = None, held: Callable[[int], bool] = never
    ) -> None:
        super().__init__(root, held)
        self._scale, self._kept = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}, kept
        self._count = 0
        self._held_target: Path | None = None

    def send(self, named_tensors: NamedTensors, version: int, members: Membership | None = None) -> WeightUpdate:
        """Write the adapter, given under the names that peft has in its files.

        Raises:
            WeightSyncError: If there is no space for it.
        """
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
        directory = self._prepared()
        self._count += 1
        # With `kept` 1 the bound would be 0, which is an empty slice: `None` takes all.
        for old in sorted(directory.glob("adapter-*"))[: -self._kept + 1 or None]:
            if old != self._held_target:
                shutil.rmtree(old)
        target = directory / f"adapter-{self._count:012d}"  # a version may be sent again with other weights
        target.mkdir()
        layers = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **self._scale, "target_modules": layers}
        (target / CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
        _write(tensors, target / WEIGHTS_FILE)
        if self._held(version):
            self._held_target = target
        return WeightUpdate(version=version, transport="adapter", payload={"path": str(target)})


def _write(tensors: dict[str, Tensor], target: Path) -> None:
    temporary = target.with_suffix(".tmp")
    size = sum(tensor.nbytes for tensor in tensors.values())
    free = shutil.disk_usage(target.parent).free
    if size > free:
        raise WeightSyncError(
            f"weights of {size / 2**20:.0f} MiB do not fit into {target.parent} ({free / 2**20:.0f} MiB free); "
            "make room there (shared memory: docker run --shm-size)"
        )
    try:
        save_file(tensors, temporary)
        temporary.rename(target)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        raise WeightSyncError(f"weights cannot be written to {target}: {error}") from error


def _remove(directory: Path, lock: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)
