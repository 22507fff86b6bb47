"""A teacher of transformers beside a rollout worker: a frozen model on a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from agentrl.algo.teacher_specs import FLAG
from agentrl.core.errors import ConfigError, RewardError
from agentrl.core.language_models import language_model
from agentrl.core.teaching import TeacherScores
from agentrl.core.tokenizers import quiet_transformers
from agentrl.core.types import IntArray, floats, ints

CHUNK = 4_000_000
"""Entries of logits that are turned into log-probabilities at once."""


class TeacherModel:
    """A `Teacher` in this process: rows go through the model one after the other, off the event loop."""

    def __init__(self, model: str, *, device: str = "cpu", dtype: str = "float32", trust_remote_code: bool = False) -> None:
        self._name, self._device, self._dtype, self._trusted = model, device, dtype, trust_remote_code
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="teacher")
        self._model: Any = None

    async def start(self) -> None:
        """As `Teacher.start`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def score(self, tokens: IntArray, places: IntArray, top_k: int) -> TeacherScores:
        """As `Teacher.score`."""
        if self._model is None:
            raise RewardError(f"{FLAG} engine:{self._name} is not loaded")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, tokens, places, top_k)

    async def close(self) -> None:
        """As `Teacher.close`."""
        self._model = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        import torch
        from safetensors import SafetensorError

        try:
            with quiet_transformers():
                kind = language_model(self._name, trust_remote_code=self._trusted)
                model = kind.from_pretrained(
                    self._name, dtype=getattr(torch, self._dtype), trust_remote_code=self._trusted, use_safetensors=True
                )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(FLAG, f"engine:{self._name}", f"cannot be loaded: {reason}", "Give a directory of a model.") from error
        self._model = model.to(self._device).eval().requires_grad_(False)

    def _score(self, tokens: IntArray, places: IntArray, top_k: int) -> TeacherScores:
        import torch

        ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        at = torch.from_numpy(places.astype(np.int64)).to(self._device)
        parts = []
        with torch.inference_mode():
            whole = self._model(ids[None], use_cache=False, logits_to_keep=at - 1).logits[0]
            rows = max(1, CHUNK // whole.shape[1])
            for logits, wanted in zip(torch.split(whole, rows), torch.split(ids[at], rows), strict=True):
                logs = logits.float().log_softmax(-1)
                best = logs.topk(min(top_k, logs.shape[1]), dim=-1)
                parts.append((logs.gather(-1, wanted[:, None])[:, 0], best.indices, best.values))
        chosen, indices, values = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        return TeacherScores(floats(chosen), ints(indices.astype(np.int32)), floats(values))
