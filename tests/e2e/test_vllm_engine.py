"""The real engine: sampling, limits, cancellation, independence of the batch."""

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import CodeGenConfig, CodeGenForCausalLM

from agentrl.core.errors import EngineDeadError
from agentrl.core.protocols import GenerationRequest
from agentrl.engine.vllm_engine import VllmEngine
from tests.e2e.vllm_support import equal, prompt, random_llama, request, saved, settings
from tests.learner_support import write_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model() -> Any:
    return random_llama()


@pytest.fixture(scope="module")
async def engine(model: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(saved(model, tmp_path_factory.mktemp("model"))))
    await engine.start()
    yield engine
    await engine.close()


async def test_recomputed_and_cached_history_give_the_same_bits(engine: VllmEngine) -> None:
    first = await asyncio.gather(*(engine.generate(request(prompt(k, 30 + k), max_tokens=150, seed=k)) for k in range(6)))
    longer = [[*prompt(k, 30 + k), *generation.token_ids.tolist(), 7, 8, 9] for k, generation in enumerate(first)]
    cached = [await engine.generate(request(ids, max_tokens=20, seed=9)) for ids in longer]
    assert any(generation.cached_tokens for generation in cached)
    await engine._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
    await engine._llm.resume_generation()
    recomputed = [await engine.generate(request(ids, max_tokens=20, seed=9)) for ids in longer]
    assert not any(generation.cached_tokens for generation in recomputed)
    assert all(equal(a, b) for a, b in zip(cached, recomputed, strict=True))


async def test_answers_are_those_of_vllms_own_front_end(model: Any, tmp_path: Path) -> None:
    """Also those of requests that are made from one which vLLM has checked, beside others with a budget, a seed and an end of their own."""
    from vllm.sampling_params import RequestOutputKind

    place = saved(model, tmp_path)
    ours, theirs = VllmEngine(settings(place)), VllmEngine(settings(place))
    await ours.start()
    await theirs.start()
    try:
        asked = [request(prompt(k, 40 + k % 3), max_tokens=5 + k, seed=k, temperature=(1.0, 0.7)[k % 2]) for k in range(12)]
        asked += [request(prompt(k, 20), max_tokens=40, seed=k, stop_token_ids=tuple(range(60 + k, 256))) for k in range(4)]

        async def bare(one: GenerationRequest) -> Any:
            limits: dict[str, Any] = {"max_tokens": one.sampling.max_tokens, "end_ids": theirs.end_token_ids}
            params = theirs._make_params(one.sampling, **limits, seed=one.sampling.seed)
            params.output_kind, params.flat_logprobs = RequestOutputKind.FINAL_ONLY, True
            given = {"type": "token", "prompt_token_ids": one.prompt_ids.tolist()}
            return [each async for each in theirs._llm.generate(given, params, one.request_id)][-1]

        for _ in range(2):  # the second time with prompts that are cached
            answers = await asyncio.gather(*map(ours.generate, asked))
            others = await asyncio.gather(*map(bare, asked))
            for answer, other in zip(answers, others, strict=True):
                end = other.outputs[0]
                assert answer.token_ids.tolist() == list(end.token_ids)
                assert answer.logprobs.tolist() == pytest.approx(end.logprobs.logprobs, abs=0.0)
                assert (str(answer.finish_reason), answer.cached_tokens) == (end.finish_reason, other.num_cached_tokens)
        assert {str(answer.finish_reason) for answer in answers} == {"stop", "length"}
        assert any(answer.cached_tokens for answer in answers)
    finally:
        await ours.close()
        await theirs.close()


async def test_a_dead_core_fails_every_waiter_at_once(model: Any, tmp_path: Path) -> None:
    engine = VllmEngine(settings(saved(model, tmp_path)))
    await engine.start()
    try:
        waiting = [asyncio.create_task(engine.generate(request(prompt(i, 20), max_tokens=230, seed=i))) for i in range(4)]
        await asyncio.sleep(0.03)

        def broken() -> None:
            raise MemoryError("a bad day")

        engine._llm.engine_core._core.step_fn = broken
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert all(isinstance(result, EngineDeadError) and "a bad day" in str(result) for result in results)
        with pytest.raises(EngineDeadError, match="a bad day"):
            await engine.generate(request(prompt(1), max_tokens=2))
    finally:
        await engine.close()


BROKEN = """
import asyncio, sys
from pathlib import Path
from agentrl.core.errors import EngineError
from agentrl.engine.vllm_engine import VllmEngine
from tests.e2e.vllm_support import IN_PROCESS, settings

async def main():
    engine = VllmEngine(settings(sys.argv[1], engine=IN_PROCESS))
    try:
        await engine.start()
    except EngineError as error:
        print("said", error)
    print("left", [str(path) for path in Path(sys.argv[2]).glob("agentrl-vllm-*")])
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_model_that_vllm_does_not_have_is_refused(tmp_path: Path) -> None:
    CodeGenForCausalLM(CodeGenConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    command = [sys.executable, "-c", BROKEN.replace("EngineError", "ConfigError"), str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert "said --engine = 'vllm': has no model CodeGenForCausalLM. Use --engine transformers" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("level", ["ERROR", "CRITICAL"])
def test_the_failure_of_a_process_of_vllm_names_its_cause(model: Any, tmp_path: Path, level: str) -> None:
    """Also where it logs nothing; vLLM's own error says only that there is a root cause above."""
    place = Path(saved(model, tmp_path / "model"))
    save_file({"model.layers.7.input_layernorm.weight": torch.zeros(2)}, place / "model.safetensors")
    with tempfile.TemporaryDirectory() as held:  # short: vLLM's sockets are in it, whose paths have a limit
        command = [sys.executable, "-c", BROKEN, str(place), held]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": level, "TMPDIR": held}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("said", "left")))
    assert "vLLM did not start with model" in lines["said"], done.stderr
    assert "ValueError: " in lines["said"], done.stderr
    assert "layers.7" in lines["said"]
    assert "root cause" not in lines["said"]
    assert "EngineCore" in done.stdout + done.stderr  # the process says so too
    assert lines["left"] == "[]"


STARTED = """
import asyncio, sys
from agentrl.engine.vllm_engine import VllmEngine
from tests.e2e.vllm_support import IN_PROCESS, settings

async def main():
    engine = VllmEngine(settings(sys.argv[1], engine=IN_PROCESS))
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.slow
def test_the_core_ends_with_the_process_that_started_it(model: Any, tmp_path: Path) -> None:
    """Of itself vLLM's core would wait for ever for requests of a front end that was killed, with its memory."""
    command = [sys.executable, "-c", STARTED, saved(model, tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        try:
            assert front.stdout.readline().strip() == "started"
            cores = [child for child in psutil.Process(front.pid).children(recursive=True) if "EngineCore" in child.cmdline()[0]]
        finally:
            front.kill()
    assert len(cores) == 1
    cores[0].wait(10)


async def test_closing_frees_the_model_and_fails_what_is_running(model: Any, tmp_path: Path) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def live_engines() -> int:
        gc.collect()
        return sum(type(thing) is AsyncLLM for thing in gc.get_objects())

    def engine_threads() -> int:
        return sum(thread.name == "agentrl-engine-core" for thread in threading.enumerate())

    before, variables, threads = live_engines(), dict(os.environ), engine_threads()
    engine = VllmEngine(settings(saved(model, tmp_path)))
    with pytest.raises(EngineDeadError, match="not started"):
        await engine.generate(request([5]))
    await engine.start()
    assert {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")} == {
        name: variables.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
    }
    running = asyncio.create_task(engine.generate(request(prompt(1, 20), max_tokens=230)))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await running
    del running  # its traceback holds the engine
    with pytest.raises(EngineDeadError, match="closed"):
        await engine.generate(request([5]))
    assert live_engines() == before
    assert engine_threads() == threads


@pytest.mark.slow
def test_starting_and_generating_prints_nothing(model: Any, tmp_path: Path) -> None:
    script = """
import asyncio, sys
from agentrl.engine.settings import prepare_environment
prepare_environment("cpu")  # before PyTorch is imported, as in processes of a run: PyTorch reads its log level once
from agentrl.engine.vllm_engine import VllmEngine
from tests.e2e.vllm_support import request, settings
async def main():
    engine = VllmEngine(settings(sys.argv[1]))
    await engine.start()
    await engine.generate(request([5, 6], max_tokens=4))
    await engine.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script, saved(model, tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
