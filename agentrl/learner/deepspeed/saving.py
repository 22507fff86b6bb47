"""Files that DeepSpeed writes of one engine and reads again in the same layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from agentrl.core.errors import CheckpointError
from agentrl.learner.deepspeed.saved import TAG, only_data


def save_engine(engine: Any, folder: Path) -> list[Path]:
    """Have an engine of DeepSpeed write its state into a folder, and return the files of this rank; collective."""
    written: list[Path] = []
    with _trained_state(engine.module), _noting_files(engine.checkpoint_engine, written):
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True)
    return written


def load_engine(engine: Any, folder: Path) -> None:
    """Have an engine of DeepSpeed read what `save_engine` wrote; collective."""
    with only_data():
        found, _ = engine.load_checkpoint(str(folder), tag=TAG, custom_load_fn=_take_trained)
    if found is None:
        raise CheckpointError(f"DeepSpeed finds no checkpoint in {folder}")


@contextmanager
def _trained_state(module: nn.Module) -> Iterator[None]:
    """Within the block, the module's state holds no frozen parameter; DeepSpeed alone would leave the second name of a tied one in."""
    frozen = _frozen_names(module)

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in list(state):
            own = name.removeprefix(prefix)
            if own in frozen or own.partition(".weight.")[0] + ".weight" in frozen:  # the latter are scales of weights in 4 bits
                del state[name]

    hooked: Any = module  # torch has no types for this method
    handle = hooked.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _noting_files(writer: Any, written: list[Path]) -> Iterator[None]:
    """Within the block, the paths that DeepSpeed's writer of files is given are added to `written`."""
    save = writer.save

    def noting(state_dict: Any, path: str) -> Any:
        written.append(Path(path))
        return save(state_dict, path)

    writer.save = noting
    try:
        yield
    finally:
        del writer.save


def _frozen_names(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


def _take_trained(src: Mapping[str, Any], dst: nn.Module) -> None:
    """Load what was saved of a module: everything but its frozen parameters."""
    result = dst.load_state_dict(src, strict=False)
    missing, unknown = set(result.missing_keys) - _frozen_names(dst), result.unexpected_keys
    if missing or unknown:
        raise CheckpointError(f"the checkpoint is of another model: it lacks {sorted(missing)[:3]} and has {sorted(unknown)[:3]} beside it")
