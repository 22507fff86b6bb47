"""The contract of engines: what holds whatever samples. Each check is a coroutine that is given an engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.assets import model_path
from agentrl.core.errors import ContextLengthError, EngineDeadError, EngineError, WeightSyncError
from agentrl.core.protocols import Engine, GenerationRequest, WeightUpdate
from agentrl.core.types import FinishReason, Generation, Sampling, ints
from agentrl.engine import own
from agentrl.testing.running import finish, require

if TYPE_CHECKING:
    from agentrl.engine.settings import EngineSettings

SETTLE_S = 2.0
"""Seconds within which an engine forgets requests that nobody waits for."""
POLL_S = 0.01
TOLERANCE = 1e-3
"""Largest difference of log-probabilities of the same tokens under the same weights."""
_ids = itertools.count()


def check_engine(make: Callable[[EngineSettings], Engine], *, model: str = "", **flags: Any) -> None:
    """Try whether an engine keeps to `agentrl.core.protocols.Engine`: answers, limits, failures, aborted requests, weights, its end.

    Args:
        make: The class of the engine, or what makes one from its settings; called several times.
        model: Directory of the model that it is given; the bundled one if it is empty.
        **flags: Settings of engines that differ from the defaults: ``max_num_seqs=8``.

    Raises:
        AssertionError: If something does not hold; with the request and the answer.
    """
    from agentrl.engine.plan import EngineConfig
    from agentrl.engine.settings import EngineSettings, prepare_environment
    from agentrl.rollout.plan import ModelConfig

    path = model_path(model)
    settings = EngineSettings(model=ModelConfig(model=path), engine=EngineConfig(**{"kv_cache_gib": 0.1, "max_num_seqs": 32, **flags}))
    prepare_environment(settings.device)
    finish(_check(lambda: make(settings), Path(path)), "the engine")


async def _check(make: Callable[[], Engine], model: Path) -> None:
    engine = make()
    await refuses_before_start(engine)
    await engine.start()
    try:
        for check in CHECKS:
            await check(engine)
        with tempfile.TemporaryDirectory() as folder:
            await takes_the_same_weights(engine, model, Path(folder))
        await ends_when_closed(engine)
    finally:
        await engine.close()
    if isinstance(engine, own.Engine) and not engine.takes_weights:
        return
    # A publication that fails ends an engine, so this check gets one of its own.
    engine = make()
    await engine.start()
    try:
        await ends_after_a_failed_publication(engine, WeightUpdate(version=4, transport="shm", payload={"update": {"path": "/nowhere"}}))
    finally:
        await engine.close()


def asks(index: int, length: int = 20, *, tokens: int = 8, **sampling: Any) -> GenerationRequest:
    """Return a request with a prompt of `length` tokens that follows from `index`, for up to `tokens` tokens, with `index` as seed."""
    draw = random.Random(index)
    prompt = [draw.randrange(5, 60) for _ in range(length)]
    return GenerationRequest(
        request_id=f"contract-{next(_ids)}", prompt_ids=ints(prompt), sampling=Sampling(max_tokens=tokens, **{"seed": index, **sampling})
    )


async def answers_are_whole(engine: Engine) -> None:
    """Each token has a log-probability and the version of the weights, and the reason for the end agrees with the tokens."""
    for index in range(4):
        request = asks(index)
        answer = await engine.generate(request)
        said = f"{request} was answered with {answer}"
        require(0 < len(answer.token_ids) <= request.sampling.max_tokens, f"an answer has 1 to max_tokens tokens: {said}")
        require(all(math.isfinite(value) and value <= 0 for value in answer.logprobs), f"log-probabilities are finite and <= 0: {said}")
        require(len(set(answer.versions.tolist())) == 1, f"without a publication all tokens have one version: {said}")
        ended = int(answer.token_ids[-1]) in engine.end_token_ids
        require(not ended or answer.finish_reason is FinishReason.STOP, f"an end token ends with {FinishReason.STOP!r}: {said}")
        require(not set(answer.token_ids[:-1].tolist()) & set(engine.end_token_ids), f"nothing is sampled behind an end token: {said}")
        full = len(answer.token_ids) == request.sampling.max_tokens
        require(full or answer.finish_reason is FinishReason.STOP, f"only a full budget ends with {FinishReason.LENGTH!r}: {said}")


async def stop_tokens_end_a_turn(engine: Engine) -> tuple[Generation, Generation]:
    """A stop token of the request ends the turn and stays in it; returns the answer without and with it."""
    free = await engine.generate(asks(3, tokens=20))
    stop = int(free.token_ids[len(free.token_ids) // 3])
    cut = await engine.generate(asks(3, tokens=20, stop_token_ids=(stop,)))
    first = free.token_ids.tolist().index(stop)
    said = f"{free.token_ids} became {cut.token_ids} ({cut.finish_reason!r}) with stop_token_ids = ({stop},)"
    require(cut.token_ids.tolist() == free.token_ids[: first + 1].tolist(), f"the turn ends with the first stop token: {said}")
    require(cut.finish_reason is FinishReason.STOP, f"a stop token ends with {FinishReason.STOP!r}: {said}")
    return free, cut


async def the_seed_decides(engine: Engine) -> None:
    """The same request with the same seed is answered alike, alone and beside others."""
    alone = [await engine.generate(asks(index)) for index in range(6)]
    together = await asyncio.gather(*(engine.generate(asks(index)) for index in range(6)))
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        said = f"seed {index}: {one.token_ids} alone, {other.token_ids} beside other requests"
        require(one.token_ids.tolist() == other.token_ids.tolist(), f"what is sampled follows from prompt, seed and weights: {said}")
        require(_near(one, other), f"log-probabilities follow from the tokens: {one.logprobs} and {other.logprobs}")


async def telling_tokens_changes_nothing(engine: Engine) -> int:
    """A request whose tokens are told as they are sampled has the same answer; returns how often an engine told some."""
    calls = 0
    for index in range(3):
        told: list[Sequence[int]] = []
        plain = await engine.generate(asks(index, tokens=12))
        # The list is bound as a default, because `told` names another one in the next round.
        heard = await engine.generate(replace(asks(index, tokens=12), on_tokens=lambda new, told=told: told.append(list(new))))  # type: ignore[misc]
        tokens = [token for new in told for token in new]
        said = f"{plain.token_ids} without and {heard.token_ids} with a listener, which was told {tokens}"
        require(plain.token_ids.tolist() == heard.token_ids.tolist() and _near(plain, heard), f"listening changes no token: {said}")
        require(not told or tokens == heard.token_ids.tolist(), f"an engine that tells tokens tells each of them once: {said}")
        calls += sum(map(bool, told))
    return calls


async def the_context_is_bounded(engine: Engine) -> None:
    """The context is used to its last token, and a prompt that leaves no room is an error."""
    length = engine.max_model_len
    last = await engine.generate(asks(3, length - 1, tokens=50))
    require(len(last.token_ids) == 1, f"a prompt of {length - 1} tokens has room for 1 in a context of {length}, got {len(last.token_ids)}")
    for beyond in (length, length + 10):
        await _refused(engine, asks(3, beyond), ContextLengthError, f"a prompt of {beyond} tokens in a context of {length}")


async def bad_requests_fail_alone(engine: Engine, *more: GenerationRequest) -> None:
    """A malformed request is an error of its own, after which the engine goes on."""
    negative = GenerationRequest(request_id=f"contract-{next(_ids)}", prompt_ids=ints([-1, 5]), sampling=Sampling())
    for bad in (negative, asks(0, 0), asks(0, top_p=7.0), *more):
        error = await _refused(engine, bad, EngineError, f"the malformed request {bad}")
        require(not isinstance(error, EngineDeadError), f"a malformed request ends itself, not the engine: {error}")
    require(len((await engine.generate(asks(0))).token_ids) > 0, "the engine goes on after malformed requests")


async def cancelled_requests_are_dropped(engine: Engine) -> list[Any]:
    """Requests whose callers are cancelled leave the engine; returns what became of each."""
    tasks = [asyncio.create_task(engine.generate(asks(index, tokens=200))) for index in range(20)]
    await asyncio.sleep(0.03)
    for task in tasks:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    wrong = [answer for answer in answers if not isinstance(answer, Generation | asyncio.CancelledError)]
    require(not wrong, f"a cancelled request ends with CancelledError: {wrong}")
    for _ in range(int(SETTLE_S / POLL_S)):
        if engine.stats().load.running:
            await asyncio.sleep(POLL_S)
    require(not engine.stats().load.running, f"{engine.stats().load.running} cancelled requests still run after {SETTLE_S:g} s")
    await engine.generate(asks(1))
    return answers


async def aborted_requests_return(engine: Engine, request: GenerationRequest | None = None) -> Generation:
    """An aborted request returns what was sampled so far, perhaps nothing; returns it."""
    asked = request or asks(3, tokens=engine.max_model_len - 100)
    generating = asyncio.create_task(engine.generate(asked))
    while not (engine.stats().load.running or generating.done()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    await engine.abort(asked.request_id)
    answer = await generating
    short = len(answer.token_ids) < asked.sampling.max_tokens
    require(answer.finish_reason is not FinishReason.LENGTH or not short, f"an aborted request does not end with LENGTH: {answer}")
    await engine.abort(asked.request_id)  # over, and passed over
    return answer


async def usage_is_counted(engine: Engine) -> tuple[Generation, Generation]:
    """Tokens of prompts and answers, and busy time, are counted; returns the answers to two requests with one prompt."""
    before = engine.stats()
    await asyncio.sleep(0.05)
    first = await engine.generate(asks(77, 140, seed=0))
    second = await engine.generate(asks(77, 140, seed=1))
    after = engine.stats()
    cached, sampled = first.cached_tokens + second.cached_tokens, len(first.token_ids) + len(second.token_ids)
    counted = {
        "tokens": (after.tokens - before.tokens, sampled),
        "prompt_tokens": (after.prompt_tokens - before.prompt_tokens, 280),
        "cached_tokens": (after.cached_tokens - before.cached_tokens, cached),
    }
    for name, (value, wanted) in counted.items():
        require(value == wanted, f"stats().{name} grew by {value} where {wanted} were due")
    busy_s, clock_s = after.busy_s - before.busy_s, after.clock_s - before.clock_s
    # The pause before the first request must not count as busy.
    require(0 < busy_s <= clock_s - 0.05, f"stats().busy_s grew by {busy_s} in {clock_s} s, 0.05 s of them without a request")
    return first, second


async def refuses_before_start(engine: Engine) -> EngineError:
    """An engine that was not started refuses requests; returns its error."""
    return await _refused(engine, asks(0), EngineDeadError, "a request before start()")


async def ends_when_closed(engine: Engine) -> list[BaseException]:
    """Closing, also twice, fails what is running and what comes later; returns the errors of these."""
    running = asyncio.create_task(engine.generate(asks(1, tokens=230)))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    (answer,) = await asyncio.gather(running, return_exceptions=True)
    require(isinstance(answer, Generation | EngineDeadError), f"closing ends what runs with EngineDeadError: {answer!r}")
    errors = [answer] if isinstance(answer, BaseException) else []
    return [*errors, await _refused(engine, asks(1), EngineDeadError, "a request after close()")]


async def takes_the_same_weights(engine: Engine, model: Path, folder: Path) -> None:
    """A publication of the weights that the engine was started with changes nothing but the version."""
    from safetensors.torch import load_file

    from agentrl.weights.sender import SharedMemorySender

    def tensors() -> dict[str, Any]:
        return {name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()}

    before = await engine.generate(asks(5))
    sender = SharedMemorySender(folder)
    try:
        version = await engine.load_weights(sender.send(tensors().items(), 1))
    finally:
        sender.close()
    require(version == 1, f"load_weights returns the version, 1: {version}")
    after = await engine.generate(asks(5))
    require(set(after.versions.tolist()) == {1}, f"tokens that are sampled after version 1 was loaded say so: {after.versions}")
    same = before.token_ids.tolist() == after.token_ids.tolist() and _near(before, after)
    require(same, f"the same weights sample the same: {before} before, {after} after they were loaded")


async def ends_after_a_failed_publication(engine: Engine, update: WeightUpdate) -> None:
    """An engine that could not load an update may hold a mixture, so it refuses everything from then on."""
    try:
        await engine.load_weights(update)
    except WeightSyncError:
        pass
    else:
        raise AssertionError(f"load_weights raises WeightSyncError for what cannot be loaded: {update}")
    await _refused(engine, asks(5), EngineDeadError, "a request after weights that could not be loaded")


async def _refused(engine: Engine, request: GenerationRequest, kind: type[EngineError], what: str) -> EngineError:
    try:
        answer = await engine.generate(request)
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} is a {kind.__name__}, not {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what} is a {kind.__name__}; it was answered with {answer}")


def _near(one: Generation, other: Generation) -> bool:
    return len(one.logprobs) == len(other.logprobs) and bool(abs(one.logprobs - other.logprobs).max(initial=0.0) <= TOLERANCE)


CHECKS: Sequence[Callable[[Engine], Any]] = (
    answers_are_whole,
    the_seed_decides,
    telling_tokens_changes_nothing,
    stop_tokens_end_a_turn,
    the_context_is_bounded,
    bad_requests_fail_alone,
    cancelled_requests_are_dropped,
    aborted_requests_return,
    usage_is_counted,
)
"""The checks of a started engine that leave it as it was."""
