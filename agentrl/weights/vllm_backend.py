"""The engine's side of publication through shared memory: a vLLM weight-transfer backend.

vLLM imports this module in whichever process holds the worker, because `WorkerExtension` is named as its
``worker_extension_cls``; the import registers the backend under `BACKEND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from agentrl.weights import vllm_groups  # registers its backends too
from agentrl.weights.rows import RowInvariantLinear, fewest_rows
from agentrl.weights.vllm_parameters import layer_sizes, worker_digests

RowPlans: TypeAlias = dict[tuple[int, int, torch.dtype], int]
"""(inputs, outputs, data type) of a layer -> fewest rows to compute at once, as in `agentrl.weights.rows`."""


def repack_lm_heads(model: torch.nn.Module) -> None:
    """Make every output layer use its current weights.

    An output layer tied to the embeddings multiplies by a packed copy made when the model was first loaded, and vLLM's
    layer-wise reload does not renew it (seen in 0.32): samples would follow the old weights without any error. In vLLM 0.26 such a layer
    is the embedding itself.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def make_row_invariant(model: torch.nn.Module, plans: RowPlans) -> None:
    """Make each row of every linear layer's output independent of how many other rows are computed with it.

    Why is said in `agentrl.weights.rows`. Which row counts agree is measured once for each shape of layer and remembered in `plans`, which
    the caller keeps for the next publication; too few rows are padded.
    """
    module: Any
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if linear is None or isinstance(linear, RowInvariantLinear):
            continue
        inputs, outputs, dtype = layer_sizes(module)
        key = (inputs, outputs, dtype)
        if key not in plans:
            plans[key] = fewest_rows(lambda x, run=linear, layer=module: run(x, layer.weight, None), inputs, dtype)  # type: ignore[misc]
        if plans[key] != 1:
            module.cpu_linear = RowInvariantLinear(linear, plans[key])


BACKEND = "agentrl_shm"
EXTENSION = "agentrl.weights.vllm_backend.WorkerExtension"


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty preparation: the path of an update says it all."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One complete set of weights."""

    path: str  # a safetensors file with the checkpoint's parameter names


class SharedMemoryTransfer(vllm_groups.Receiving, WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):  # type: ignore[misc]
    """Loads a safetensors file that the learner wrote into shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._row_plans: RowPlans | None = None
        self._expected: set[str] = set()

    def make_row_invariant(self) -> None:
        """Make the model's CPU layers independent of the batch, from now on and after every update."""
        self._row_plans = {}
        make_row_invariant(self.model, self._row_plans)

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """No connection is made."""

    def start_weight_update(self) -> None:
        """Put the model into the state in which it takes checkpoint tensors."""
        self._expected = {name for name, _ in self.model.named_parameters()}  # tied ones once, as long as they are tied
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load every tensor of the file.

        Raises:
            ValueError: If a parameter of the model got no new value.
        """
        loaded = self.model.load_weights(_tensors(update_info.path))
        # A model may not say what it has loaded; then only layers that are filled in part are noticed.
        missing = self._expected - loaded if loaded is not None else set()
        missing.update(_unfinished(self.model))
        if missing:
            raise ValueError(f"{update_info.path} lacks values for {len(missing)} parameters, for example {min(missing)}")

    def finish_weight_update(self) -> None:
        """Leave that state and repair what vLLM leaves stale."""
        finalize_layerwise_reload(self.model, self.model_config)
        # In this order: repacking makes new functions, which are made independent of the batch afterwards.
        if self.device.type == "cpu":
            repack_lm_heads(self.model)
        if self._row_plans is not None:
            make_row_invariant(self.model, self._row_plans)

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""


def _unfinished(model: torch.nn.Module) -> Iterator[str]:
    """Layers that got some of their values and not all: one part of a fused projection, say.

    vLLM would fill the rest with whatever is in memory. Embeddings are left out, because their padding never gets values.
    """
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not isinstance(layer, VocabParallelEmbedding) and info.can_load() and 0 < info.load_numel < info.load_numel_total:
            yield name


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open has no iterator
            yield name, file.get_tensor(name)


class WorkerExtension:
    """Mixed into vLLM's worker, which also imports this module beside it."""

    weight_transfer_engine: Any

    def make_row_invariant(self) -> None:
        """As `SharedMemoryTransfer.make_row_invariant`."""
        self.weight_transfer_engine.make_row_invariant()

    def weights_outcome(self) -> str:
        """As `agentrl.weights.vllm_groups.GroupTransfer.outcome`."""
        return str(self.weight_transfer_engine.outcome())

    def weight_digests(self, shapes: dict[str, list[int]], dtype: str) -> dict[str, list[Any]]:
        """As `agentrl.weights.vllm_parameters.worker_digests`."""
        return worker_digests(self.weight_transfer_engine.model, shapes, getattr(torch, dtype))


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
