"""vLLM's engine core on a thread of this process, behind the client interface that `AsyncLLM` expects.

vLLM runs its core in a process of its own, which imports everything a second time; on a laptop CPU that is most of the
start-up. The thread here owns the core: it alone touches it. Other threads put commands on a queue and get futures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import random
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.engine.commands import CommandQueue

PASSED_ON = (
    *("pause_scheduler", "resume_scheduler", "sleep", "wake_up", "collective_rpc", "get_supported_tasks"),
    *("set_weight_version", "get_weight_version", "add_lora", "remove_lora", "list_loras"),
)
"""Methods of `EngineCore` that `AsyncLLM` calls here."""


class InProcessCore:
    """The part of vLLM's asynchronous core client that `AsyncLLM` uses, without a process.

    The thread consumes commands, steps the core while it has runnable requests, and hands outputs to the event loop.
    It waits only for commands, and is unblocked by the next one; `shutdown` sends the last. If a step raises, the
    thread ends: every pending and later call, and the reader of outputs, get `EngineDeadError` at once.
    """

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, **_: Any) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._commands = CommandQueue()
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._lock = threading.Lock()
        _living.add(self)
        self._error: EngineDeadError | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(ready, vllm_config, executor_class, log_stats), name="agentrl-engine-core", daemon=True
        )
        self._thread.start()
        ready.result()

    # What AsyncLLM calls, on the event loop.

    async def get_output_async(self) -> Any:
        """The next step's outputs; raises `EngineDeadError` once the core is gone."""
        if self._reader is None:
            self._reader = (asyncio.get_running_loop(), asyncio.Event())
        _, arrived = self._reader
        while True:
            # Cleared before the look, so that an output which arrives in between wakes this reader.
            arrived.clear()
            with contextlib.suppress(queue.Empty):
                return self._outputs.get_nowait()
            if self._error is not None:
                raise self._error
            await arrived.wait()

    async def add_request_async(self, request: Any) -> None:
        """Queue a request; if the core refuses it, it ends with finish reason "error"."""
        self._post(lambda: self._add(request), None)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Drop requests and free their cache blocks; a dead core has nothing to drop."""
        if request_ids and self._error is None:
            self._post(lambda: self._core.abort_requests(request_ids), None)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """The calls of vLLM's core that are passed on as they are; no step is in flight when one runs, on the same thread."""
        method = name.removesuffix("_async")
        if method == name or method not in PASSED_ON:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return lambda *args, **named: self._call(lambda: getattr(self._core, method)(*args, **named))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread after its current step and release the model; safe to call twice."""
        self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # The thread.

    def _run(self, ready: Future[None], vllm_config: Any, executor_class: Any, log_stats: bool) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        try:
            self._core = EngineCore(vllm_config, executor_class, log_stats)
        except BaseException as error:
            _living.discard(self)
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while self._commands.serve(self._runnable):
                if self._runnable():
                    self._step()
        except BaseException as error:
            self._die(error)
        else:
            self._die(None)
        self._release()

    def _runnable(self) -> bool:
        scheduler = self._core.scheduler
        return bool(scheduler.has_requests()) and scheduler.pause_state != PauseState.PAUSED_ALL

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        for output in (outputs or {}).values():
            self._outputs.put(output)
            self._wake()

    def _add(self, request: Any) -> None:
        try:
            prepared, wave = self._core.preprocess_add_request(request)
            self._core.add_request(prepared, wave)
        except Exception:
            failed = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            self._outputs.put(EngineCoreOutputs(outputs=[failed]))
            self._wake()

    def _die(self, cause: BaseException | None) -> None:
        error = EngineDeadError() if cause is None else EngineDeadError(f"{type(cause).__name__}: {cause}")
        if cause is not None:
            error.add_note("".join(traceback.format_exception(cause)))
        with self._lock:
            self._error = error
            self.resources.engine_dead = True
        self._commands.drain()
        self._wake()

    def _release(self) -> None:
        core = self._core
        del self._core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        # vLLM froze the heap when it started: nothing of the model would ever be collected.
        gc.unfreeze()
        _living.discard(self)
        if not _living:
            _destroy_vllm_groups()

    def _wake(self) -> None:
        if self._reader is not None:
            loop, arrived = self._reader
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(arrived.set)

    def _post(self, function: Callable[[], Any], future: Future[Any] | None) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._commands.put(lambda: self._do(function, future))

    def _do(self, function: Callable[[], Any], future: Future[Any] | None) -> None:
        """Run a command, whose result is awaited where there is a future; what came too late gets the error."""
        if future is None:
            if self._error is None:
                function()
        elif future.set_running_or_notify_cancel():
            try:
                if self._error is not None:
                    raise self._error
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    async def _call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._post(function, future)
        return await asyncio.wrap_future(future)


# vLLM keeps its process groups in globals, which all engines of this process share.
_living: set[InProcessCore] = set()


def _destroy_vllm_groups() -> None:
    """Destroy vLLM's process groups but not PyTorch's default one, which a learner in this process may share."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None


@contextlib.contextmanager
def _process_state_kept() -> Iterator[None]:
    """Undo what building an engine changes for the rest of the process: random states, thread count, variables.

    vLLM seeds every global generator, disables `torch.set_num_threads`, and sets ``LD_PRELOAD`` and ``LOCAL_WORLD_SIZE``,
    which every child process and DeepSpeed would see.
    """
    variables = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def with_core_stats(build: Callable[[], Any], *, in_process: bool) -> Any:
    """Call `build`, which makes an `AsyncLLM` with statistics off, such that its core reports running, waiting and cache usage.

    vLLM's own switch would also time every request and every step in this process, and export all of it to Prometheus. `AsyncLLM`
    takes no client as an argument, so its factory is replaced while `build` runs, and only for that time.
    """
    factory = EngineCoreClient.make_async_mp_client
    make = InProcessCore if in_process else factory
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **named: make(**{**named, "log_stats": True}))
    try:
        with _process_state_kept() if in_process else contextlib.nullcontext():
            return build()
    finally:
        EngineCoreClient.make_async_mp_client = factory
