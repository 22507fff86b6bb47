"""Low-rank adapters that a vLLM engine holds beside its model: one for each of the latest versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentrl.core.protocols import WeightUpdate
from agentrl.engine.engine_args import NATIVE_RANKS

SPARE_ADAPTERS = 1
"""Room for an adapter that a request still uses when it would be unloaded."""


def room_for(rank: int) -> int:
    """Return the smallest of `NATIVE_RANKS` that has room for an adapter of `rank`."""
    return next(room for room in NATIVE_RANKS if room >= rank)


@dataclass(slots=True)
class LoadedAdapter:
    """One adapter in the engine."""

    version: int  # of the policy
    request: Any  # vLLM's name for it, given with every request that uses it
    users: int = 0  # requests under way with it


class Adapters:
    """Loads each version under a name and an id that no adapter had before, and unloads the oldest first.

    vLLM would go on with old weights if new ones came under a known name or id, and its prefix cache tells adapters apart by
    name. A request keeps the adapter that it began with, whatever is loaded meanwhile. Until the first version is loaded, requests
    use the model alone.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept  # adapters that are held at once
        self._count = 0
        self._loaded: list[LoadedAdapter] = []  # the oldest first

    async def load(self, llm: Any, update: WeightUpdate) -> int:
        """Unload what is too old, load the adapter of `update`, and return its version.

        Raises:
            ValueError: If vLLM does not report it as loaded.
        """
        from vllm.lora.request import LoRARequest

        while len(self._loaded) >= self._kept and (old := next((known for known in self._loaded if not known.users), None)) is not None:
            await llm.remove_lora(old.request.lora_int_id)
            self._loaded.remove(old)
        self._count += 1
        name = f"version-{update.version}-{self._count}"  # a learner that went back to a checkpoint publishes a version again
        request = LoRARequest(name, self._count, str(update.payload["path"]))
        await llm.add_lora(request)
        if request.lora_int_id not in await llm.list_loras():
            raise ValueError(f"the engine does not list the adapter of version {update.version}")
        self._loaded.append(LoadedAdapter(update.version, request))
        return update.version

    def begin(self) -> LoadedAdapter | None:
        """Return the latest adapter for a request, `None` before the first; it stays loaded until the request has ended."""
        adapter = self._loaded[-1] if self._loaded else None
        if adapter is not None:
            adapter.users += 1
        return adapter

    def end(self, adapter: LoadedAdapter | None) -> None:
        """A request that began with this adapter has ended."""
        if adapter is not None:
            adapter.users -= 1
