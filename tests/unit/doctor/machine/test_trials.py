"""Trials of a machine: sound parts are good, planted errors are wrong, and a trial that crashes or hangs costs itself alone."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from agentrl.core.errors import MismatchError, WeightsDifferError
from agentrl.core.types import FinishReason, Generation, floats, ints
from agentrl.doctor.machine import examine as examination
from agentrl.doctor.machine import exchange, kernels, rounds, speed
from agentrl.doctor.machine.examine import Trials, run_trials
from agentrl.doctor.machine.findings import Finding, Level
from agentrl.doctor.machine.trials import TRIALS, failed
from agentrl.engine.settings import weight_transport
from agentrl.learner import attention, head
from agentrl.resolve.parts import mismatch_limit
from agentrl.resolve.sizing.rates import Rates, read_rates
from tests.shared_files import FileHandles

CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes."""
    monkeypatch.setitem(kernels.ROWS, "cpu", (70, 33, 17))
    monkeypatch.setitem(kernels.HEAD, "cpu", (20, 300, 16))
    monkeypatch.setattr(head, "chunk_rows", lambda vocabulary: 8)


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.usefixtures("few")
def test_sound_kernels_are_good() -> None:
    found = by_name(kernels.kernels(CPU))
    levels = {name: str(finding.level) for name, finding in found.items()}
    untried = {"flash_attention_2": "not tried", "flash_attention_3": "not tried"}
    assert levels == {"sdpa": "good", "varlen": "good", "prefix trees": "good", **untried}
    assert [finding.level for finding in kernels.head(CPU)] == [Level.GOOD]


def without_window(*arguments: Any, **options: Any) -> Tensor:
    """Rows back to back, by a kernel that leaves out the window."""
    *rest, _, softcap = arguments
    return attention._reference(*rest, None, softcap, capped=False)


def row_of_all(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, *rest: Any) -> Tensor:
    """Rows back to back that see each other."""
    return attention._reference(query, key, value, bounds[[0, -1]], longest, *rest, capped=False)


def wrong_gradient(*arguments: Any) -> Tensor:
    """The right values with half of the values' gradients."""
    query, key, value, *rest = arguments
    return attention._reference(query, key, (value + value.detach()) / 2, *rest, capped=False)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kernel", [without_window, row_of_all, wrong_gradient])
def test_a_wrong_kernel_is_named(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._PACKED, "varlen", kernel)
    found = by_name(kernels.kernels(CPU))
    assert found["varlen"].level is Level.WRONG
    assert "--attn-implementation sdpa" in found["varlen"].remedy
    assert found["sdpa"].level is Level.GOOD


@pytest.mark.usefixtures("few")
def test_a_mask_that_shows_other_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "tree_mask", lambda ends: attention.tree_mask(torch.full_like(ends, len(ends))))
    shared = by_name(kernels.kernels(CPU))["prefix trees"]
    assert shared.level is Level.WRONG
    assert "--no-share-prompts" in shared.remedy


@pytest.mark.usefixtures("few")
def test_a_wrong_output_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_linear", lambda hidden, weight, bias, wide: hidden @ weight.T * 1.2)
    (found,) = kernels.head(CPU)
    assert found.level is Level.WRONG
    monkeypatch.undo()
    assert kernels._verdict("x", [math.nan, 0.0]).level is Level.WRONG


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setitem(speed.SIDE, "cpu", 64)
    monkeypatch.setitem(speed.BYTES, "cpu", 2**16)
    *findings, rates = speed.speed(CPU)
    assert [finding.name for finding in findings] == ["matmul bfloat16", "matmul float32", "memory"]
    assert isinstance(rates, Rates)
    assert min(rates.matmul_bfloat16, rates.matmul_float32, rates.memory, rates.device_bytes) > 0
    assert speed.transfer_rate(CPU, back=True, size=2**10) > 0
    assert speed.device_name(CPU)


@pytest.mark.parametrize(
    ("answer", "level"), [("1755, 1980, 54\n", "good"), ("600, 1980, 91\n", "warning"), ("[N/A], [N/A], 40\n", ""), ("", "")]
)
def test_a_clock_that_is_held_back_is_a_warning(answer: str, level: str) -> None:
    found = speed.clock_finding(answer)
    assert ("" if found is None else str(found.level)) == level


@pytest.mark.slow
def test_bytes_arrive_in_another_process() -> None:
    (shared,) = exchange.shared(CPU)
    assert (shared.level, shared.name) == (Level.GOOD, "shared memory")
    sent, got, _ = exchange.over_handles(CPU, 2**12, FileHandles)
    assert sent == got
    assert len(set(sent)) == exchange.COUNT


class Torn(FileHandles):
    """Memory of which the other process maps something else."""

    def open(self, handle: str, device: torch.device) -> Tensor:
        return super().open(handle, device) ^ 1


class Lost(FileHandles):
    """Memory that the other process cannot map."""

    def open(self, handle: str, device: torch.device) -> Tensor:
        os.unlink(handle)
        raise RuntimeError("invalid device context")


@pytest.mark.slow
def test_bytes_that_differ_and_memory_that_cannot_be_mapped_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, got, _ = exchange.over_handles(CPU, 2**12, Torn)
    assert sent != got
    monkeypatch.setattr(exchange, "_over_files", lambda device, size: exchange.over_handles(device, 2**12, Torn))
    (torn,) = exchange.shared(CPU)
    assert torn.level is Level.WRONG
    assert "differ by digest" in torn.found
    monkeypatch.setattr(exchange, "_over_files", lambda device, size: exchange.over_handles(device, 2**12, Lost))
    (lost,) = exchange.shared(CPU)
    assert lost.level is Level.WRONG
    assert "invalid device context" in lost.found


FAKE = """
import os, sys, time
kind, parent, *names = sys.argv[1:]
def tell(kind, value):
    import json
    print(json.dumps({"kind": kind, "value": value}), flush=True)
for name in names:
    tell("begin", name)
    if name == "kernels":
        print("illegal memory access", file=sys.stderr)
        os._exit(1)
    if name == "collective":
        time.sleep(100)
    if name == "rates":
        tell("rates", {"memory": 5.0, "date": "2026-11-23"})
    tell("finding", {"part": "x", "name": name, "level": "good", "found": "", "remedy": ""})
    tell("end", name)
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of which one crashes and one hangs, in real processes."""
    script = tmp_path / "trials.py"
    script.write_text(FAKE, encoding="utf-8")
    start = subprocess.Popen
    monkeypatch.setattr(examination, "IMPORTS_S", 1.0)
    monkeypatch.setattr(examination.subprocess, "Popen", lambda words, **more: start([sys.executable, str(script), *words[3:]], **more))
    for name in TRIALS:
        monkeypatch.setitem(TRIALS, name, type(TRIALS[name])(TRIALS[name].part, 0.5, TRIALS[name].doc))  # type: ignore[index]


@pytest.mark.usefixtures("scripted")
def test_a_crash_and_a_hang_cost_one_trial_each() -> None:
    made, told = Trials(), list[str]()
    run_trials(["rates", "kernels", "head", "collective", "shared"], "cpu", made, end=time.monotonic() + 30, tell=told.append)
    levels = {finding.name: (str(finding.level), finding.found) for finding in made.findings}
    assert levels == {
        "rates": ("good", ""),
        TRIALS["kernels"].doc: ("wrong", "its process ended: illegal memory access"),
        "head": ("good", ""),
        TRIALS["collective"].doc: ("wrong", "did not end within its time"),
        "shared": ("good", ""),
    }
    assert made.rates.memory == 5.0
    assert told[0] == TRIALS["rates"].doc


@pytest.mark.usefixtures("scripted")
def test_no_trial_begins_when_the_time_is_used_up() -> None:
    made = Trials()
    begin = time.monotonic()
    run_trials(["collective", "head"], "cpu", made, end=begin + 0.5)
    assert time.monotonic() - begin < 5
    assert [(finding.found, finding.level) for finding in made.findings] == [("no time was left", Level.UNTRIED)] * 2


def test_a_trial_that_failed_says_how_to_see_more() -> None:
    assert "agentrl.doctor.machine.trials DEVICE 0 vllm" in failed("vllm", "TypeError: x").remedy


def test_answers_before_and_after_sleep_are_compared() -> None:
    class Sleeper:
        """An engine that answers differently once it has slept, by log-probability or by token."""

        def __init__(self, gap: float, token: int = 7) -> None:
            self.gap, self.token, self.slept = gap, token, False

        async def generate(self, request: Any) -> Generation:
            token, logprob = (self.token, -1.0 - self.gap) if self.slept else (7, -1.0)
            return Generation(token_ids=ints([token]), logprobs=floats([logprob]), versions=ints([0]), finish_reason=FinishReason.LENGTH)

        async def sleep(self, level: int) -> None:
            self.slept = True

        async def wake(self, *parts: str) -> None:
            assert parts == ("weights", "kv_cache")

    def found(engine: Sleeper) -> Finding:
        return asyncio.run(rounds.slept("transformers", engine, [ints([1, 2])], CPU))

    assert found(Sleeper(0.0)).found == "the same answers, off by 0.0e+00 nats"
    assert found(Sleeper(0.5)).level is Level.WRONG
    assert found(Sleeper(0.0, token=8)).found == "other answers"


class Learner:
    """A learner whose state has other digests after each move, and that finds a given difference to its engine."""

    def __init__(self, *, kept: bool, mismatch: float = 0.0) -> None:
        self.kept, self.mismatch, self.moves = kept, mismatch, 0

    def digests(self) -> list[int]:
        return [1, 2] if self.kept else [1, self.moves]

    def offload(self, keep_weights: bool) -> None:
        self.moves += not keep_weights

    def reload(self) -> None:
        self.moves += 1

    def train(self, step: int, *groups: Any) -> Any:
        if self.mismatch > 1.0:
            raise MismatchError("step 1: the learner and the engine disagree\nLikely causes")
        return SimpleNamespace(metrics={"mismatch/mean": self.mismatch, "grad_norm": 1.0})

    def export_weights(self, version: int) -> None:
        return


@pytest.mark.parametrize("kept", [True, False])
def test_state_that_changes_on_its_way_is_wrong(kept: bool) -> None:
    found = rounds.moved(Learner(kept=kept), CPU)
    assert found.level is (Level.GOOD if kept else Level.WRONG)
    assert found.found == f"2 tensors {'equal' if kept else 'differ'} by digest"


@pytest.mark.parametrize(("mismatch", "level"), [(0.001, "good"), (0.5, "wrong"), (math.nan, "wrong"), (2.0, "wrong")])
def test_an_engine_that_computes_something_else_is_wrong(mismatch: float, level: str) -> None:
    limit = mismatch_limit(rounds.settings("transformers", CPU), "cpu")
    assert limit is not None
    found = rounds._step("an engine", Learner(kept=True, mismatch=mismatch), 0, [], limit)
    assert str(found.level) == level


def test_weights_that_did_not_arrive_are_wrong() -> None:
    class Engine:
        async def load_weights(self, update: Any) -> None:
            raise WeightsDifferError("1 of 12 tensors are not the learner's: lm_head.weight")

    engine: Any = Engine()
    found = asyncio.run(rounds._published("after a publication", Learner(kept=True), engine, [], 0.01))
    assert (found.level, found.found) == (Level.WRONG, "1 of 12 tensors are not the learner's: lm_head.weight")


def test_kernels_take_the_shapes_of_a_gpu() -> None:
    """Fake tensors on a GPU, through the signature of torch's kernel; nothing is computed."""
    device = torch.device("cuda", 0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parts = kernels._parts(sum(kernels.ROWS["cuda"]), device)
        for window in (None, 50):
            output = kernels._packed(attention.KERNELS["varlen"], kernels.ROWS["cuda"], window)(*parts)
            assert (output.shape, output.device, output.dtype) == ((1, sum(kernels.ROWS["cuda"]), 8, 64), device, torch.bfloat16)


def test_settings_of_a_gpu_let_every_engine_sleep_and_take_files() -> None:
    config = rounds.settings("vllm", torch.device("cuda", 0))
    assert config.weights.sleeps
    assert weight_transport(config.engine, config.weights, "cuda") == "shm"
    assert mismatch_limit(config, "cuda") == 0.1
    assert config.engine.memory_share(config.weights, 8e10) == rounds.GPU_SHARE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_examines_this_machine_within_three_minutes(tmp_path: Path) -> None:
    begin = time.monotonic()
    environment = {**os.environ, "AGENTRL_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "agentrl", "doctor", "--json", "--device", "cpu"]
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert time.monotonic() - begin < 185
    report = json.loads(ran.stdout)
    levels = {f"{finding['part']} {finding['name']}": finding["level"] for finding in report["findings"]}
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in ("kernels varlen", "bytes gloo", "bytes shared memory", "training transformers after a publication"):
        assert levels[name] == "good"
    assert levels["training learner offloaded and back"] == "good"
    (rates,) = [rates for name, rates in read_rates().items() if name == report["device"]]
    assert rates.matmul_float32 > 0
