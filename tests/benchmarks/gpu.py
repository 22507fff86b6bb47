"""The acceptance run of one GPU, in at most nine minutes: ``agentrl doctor``, speed and memory of the learner, the demo with each engine.

    make gpu

prints a page with date, device, versions and figures, and writes it to ``gpu-report.md``. Any Python with torch for CUDA will do
(``GPU_PYTHON``); vLLM and Ray are not needed. A part that cannot run is named on the page, and the rest goes on. Every part also runs on a
CPU with sizes so small that the figures mean nothing; a test does that.
"""

from __future__ import annotations

import datetime
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.model_shape import shape_of
from agentrl.core.types import Group, Status, Task, Trajectory, ints
from agentrl.doctor.machine.packages import installed
from agentrl.doctor.machine.speed import matmul_rate
from agentrl.learner.attention import KERNELS, Costs, register
from agentrl.learner.batch import Batch, collate
from agentrl.learner.layout import Layout, MicroBatch
from agentrl.learner.trees import one_row_bundles, share_prefixes
from agentrl.resolve.sizing.memory import CONTEXT, learner_parts
from agentrl.resolve.sizing.speed import pass_flops
from tests.benchmarks._gpu_checks import WHOLE, Found, demo, doctor, findings
from tests.benchmarks.balance import answer
from tests.benchmarks.learner_memory import PeakMemory, micro_batch

LIMIT_S = 540.0
REPORT = Path("gpu-report.md")
MFU, AGAINST_PLAIN, PLAN_ERROR = 0.45, 0.95, 0.10
"""Targets: share of the measured matmul rate, speed over that of the best plain loop, and error of the planned peak."""

ALL_SHARED = Costs(causal=1.0, masked=0.0, skips=True)
"""Costs by which every prompt is shared."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    model: Mapping[str, Any]  # as Qwen2Config takes it
    tokens: int  # of a packed micro-batch
    rows: int  # in it, all equally long
    peaks: tuple[int, ...]  # tokens of the micro-batches whose memory is measured
    prompts: tuple[tuple[int, int], ...]  # tokens of a prompt that rows share, and of each answer
    members: int  # rows that share it
    adam: int  # parameters of the offloaded optimizer
    repeats: int  # steps that are timed
    trials: bool  # of `agentrl doctor`
    engines: tuple[Literal["transformers", "vllm"], ...]  # of the demo
    demo_steps: int


QWEN_1B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
FULL = Sizes(
    model=QWEN_1B,
    tokens=8192,
    rows=8,
    peaks=(8192, 16384, 32768),
    prompts=((4096, 1024), (1024, 4096)),
    members=8,
    adam=200_000_000,
    repeats=5,
    trials=True,
    engines=("transformers", "vllm"),
    demo_steps=WHOLE,
)


class Bench:
    """Measurements on one device; each yields the lines that it adds to the table."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.shape = shape_of({**sizes.model, "model_type": "qwen2"})
        self.examined: Mapping[str, Any] = {}  # report of `doctor`
        self._matmul_rate = 0.0  # floating-point operations per second
        self._ranks: Any = None  # the learner's only rank, from the first measurement that needs one

    def close(self) -> None:
        """Take down what the learner has set up."""
        if self._ranks is not None:
            self._ranks.leave()
            self._ranks = None

    def pieces(self) -> dict[str, Callable[[], Iterator[Found]]]:
        """Return all parts by name, the most important first."""
        demos = {f"demo_{engine}": partial(demo, engine, self.sizes.demo_steps, self.device) for engine in self.sizes.engines}
        learner = {"speed": self.speed, "memory": self.memory, "shared_prompts": self.shared_prompts}
        return {"doctor": self.doctor, **learner, **demos, "adam": self.adam}

    def doctor(self) -> Iterator[Found]:
        """The machine, examined by ``agentrl doctor``: limits, versions, rates, kernels, bytes, two steps with each engine."""
        self.examined = doctor(self.device, trials=self.sizes.trials)
        return findings(self.examined)

    @property
    def matmul_rate(self) -> float:
        """Measured rate of matrix products in bfloat16, by `doctor` or, where that failed, here."""
        if not self._matmul_rate:
            self._matmul_rate = float(self.examined.get("rates", {}).get("matmul_bfloat16", 0.0))
            self._matmul_rate = self._matmul_rate or matmul_rate(self.device, torch.bfloat16)
        return self._matmul_rate

    def speed(self) -> Iterator[Found]:
        """Training steps of the learner and of plain loops, on equally long rows, so that padding is no disadvantage.

        The last two do what the learner's optimizer does, and it is compared with them: sums of gradients, master weights and moments in
        float32, and a bounded norm.
        """
        tokens, rows = self.sizes.tokens, self.sizes.rows
        length = tokens // rows
        flops = 3 * pass_flops(self.shape, length) * tokens
        seconds = {
            "plain loop, transformers with sdpa": self._plain(rows, length, packed=False),
            "plain loop, the same with varlen": self._plain(rows, length, packed=True),
            "plain loop, float32 master weights": self._plain(rows, length, packed=False, master=True),
            "plain loop, float32 master weights and varlen": self._plain(rows, length, packed=True, master=True),
            "learner": self._learner(rows, length),
        }
        for name, took in seconds.items():
            rate = flops / took
            share = rate / self.matmul_rate
            value = f"{took:.3f} s for {tokens:,} tokens, {rate / 1e12:.1f} model TFLOP/s, {share:.2f} of matmul"
            learner = name == "learner"
            yield Found(name=name, value=value, target=f">= {MFU} of matmul" if learner else "", met=not learner or share >= MFU)
        *half, first, second, own = seconds.values()
        ratio = min(first, second) / own
        value = f"{ratio:.2f}; over the best with bfloat16 alone {min(half) / own:.2f}"
        name = "learner over the best plain loop with float32 master weights"
        yield Found(name=name, value=value, target=f">= {AGAINST_PLAIN}", met=ratio >= AGAINST_PLAIN)

    def memory(self) -> Iterator[Found]:
        """Peak of a step with gradient checkpointing, against what ``agentrl plan`` computes."""
        config = changed(TrainConfig(), num_learners=1, zero_stage=2, gradient_checkpointing=True)
        for tokens in self.sizes.peaks:
            engine = self._engine(checkpointing=True)
            micro = micro_batch(tokens, self.shape.vocabulary).to(self.device)
            self._step(engine, micro)  # the optimizer's state is made
            found = self._peak(lambda engine=engine, micro=micro: self._step(engine, micro))
            engine.close()
            parts = learner_parts(changed(config, micro_batch_tokens=tokens), self.shape)
            planned = sum(size for name, size in parts.items() if name != "for the engines") - CONTEXT
            error = planned / found - 1.0
            value = f"{found / 2**30:.1f} GiB, planned {planned / 2**30:.1f} ({error:+.0%})"
            met = abs(error) <= PLAN_ERROR
            yield Found(name=f"peak memory at {tokens:,} tokens", value=value, target=f"within {PLAN_ERROR:.0%}", met=met)

    def shared_prompts(self) -> Iterator[Found]:
        """Forward and backward pass over rows with one prompt: by a dense mask, by flex attention, and with the prompt in every row."""
        policy = self._policy(checkpointing=True)
        for prompt, length in self.sizes.prompts:
            batch = batch_of(self.sizes.members, prompt, length)
            shared = share_prefixes(batch, budget=10**9, hidden_size=self.shape.hidden_size, costs=ALL_SHARED)
            times = {}
            for name, kernel, bundles in (
                ("dense mask", "sdpa", shared),
                ("flex", "varlen", shared),
                ("varlen, prompt in every row", "varlen", one_row_bundles(batch)),
            ):
                use(policy.model, kernel)
                micro = Layout(batch).micro_batch(bundles, packed=KERNELS[kernel].packed).to(self.device)
                times[name] = self._guarded(lambda micro=micro: policy(micro)[0].sum().backward())
            value = ", ".join(f"{name} {took if isinstance(took, str) else f'{took:.3f} s'}" for name, took in times.items())
            yield Found(name=f"prompt of {prompt:,}, {self.sizes.members} answers of {length:,}", value=value)

    def adam(self) -> Iterator[Found]:
        """An optimizer step in CPU memory, by torch's fused kernel and by its plain one."""
        number, threads = self.sizes.adam, torch.get_num_threads()
        took = {}
        for fused in (True, False):
            parameter = torch.nn.Parameter(torch.zeros(number))
            parameter.grad = torch.ones(number)
            optimizer = torch.optim.AdamW([parameter], fused=fused)
            took[fused] = self._seconds(optimizer.step) * 1e9 / number
        value = f"{took[True]:.1f} s fused, {took[False]:.1f} s plain, {threads} threads"
        yield Found(name="offloaded Adam, 1e9 parameters", value=value)

    def _policy(self, *, checkpointing: bool) -> Any:
        from agentrl.learner.models import PolicyModel

        model = self._model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        use(model, "varlen")
        return PolicyModel(model).train()

    def _model(self) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        gc.collect()  # modules form cycles, and the model of before would count
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                return Qwen2ForCausalLM(Qwen2Config(**self.sizes.model, attn_implementation="sdpa", use_cache=False))
        finally:
            torch.set_default_dtype(before)

    def _engine(self, *, checkpointing: bool) -> Any:
        from agentrl.learner.deepspeed.ranks import join

        kind: Any = self.device.type
        if self._ranks is None:
            self._ranks = join(0, 1, master_port=0, master_addr="127.0.0.1", device=kind, timeout_s=60)
        from agentrl.learner.deepspeed.engine import ZeroEngine

        return ZeroEngine(self._policy(checkpointing=checkpointing), changed(TrainConfig(), zero_stage=2).learner, self._ranks, bf16=True)

    def _step(self, engine: Any, micro: MicroBatch) -> None:
        engine.accumulate(-engine(micro)[0].mean(), last=True)
        engine.update(1e-6)

    def _learner(self, rows: int, length: int) -> float:
        batch = batch_of(rows, 1, length - 1)
        micro = Layout(batch).micro_batch(one_row_bundles(batch), packed=True).to(self.device)
        engine = self._engine(checkpointing=False)
        took = self._seconds(lambda: self._step(engine, micro))
        engine.close()
        return took

    def _plain(self, rows: int, length: int, *, packed: bool, master: bool = False) -> float:
        """Seconds of the loop that one would write by hand: bfloat16 weights, all logits, AdamW, with `master` on float32 copies."""
        model = self._model().train()
        weights = list(model.parameters())
        trained = [weight.detach().float() for weight in weights] if master else weights
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        tokens = torch.randint(self.shape.vocabulary, (rows, length), device=self.device)
        inputs: dict[str, Any] = {"input_ids": tokens}
        if packed:
            use(model, "varlen")
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=self.device)
            place = torch.arange(length, device=self.device).repeat(rows)[None]
            inputs = {"input_ids": tokens.view(1, -1), "position_ids": place, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": length, "max_length_k": length}

        def step() -> None:
            logits = model(**inputs).logits.flatten(0, 1)
            torch.nn.functional.cross_entropy(logits[:-1], tokens.flatten()[1:]).backward()
            if master:
                for weight, copy in zip(weights, trained, strict=True):
                    copy.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if master:
                with torch.no_grad():
                    torch._foreach_copy_(weights, trained)

        return self._seconds(step)

    def _seconds(self, function: Callable[[], Any]) -> float:
        function()
        times = []
        for _ in range(self.sizes.repeats):
            self._wait()
            begin = time.perf_counter()
            function()
            self._wait()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _guarded(self, function: Callable[[], Any]) -> float | str:
        try:
            return self._seconds(function)
        except torch.OutOfMemoryError:
            return "out of memory"

    def _peak(self, function: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            function()
            return float(torch.cuda.max_memory_allocated(self.device))
        with PeakMemory() as memory:
            function()
        return float(memory.peak)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def batch_of(members: int, prompt: int, length: int) -> Batch:
    """One group of single-turn episodes with the same prompt, whose answers differ from their first token on."""
    given = ints(torch.arange(prompt).remainder(1000).int().numpy())
    turns = [replace(answer(given, length), token_ids=ints(torch.full((length,), n).int().numpy())) for n in range(members)]
    trajectories = tuple(
        Trajectory(trajectory_id=str(n), episode_id=str(n), group_id=0, turns=(turn,), status=Status.FINISHED, reward=0.0)
        for n, turn in enumerate(turns)
    )
    return collate([Group(group_id=0, task=Task("x"), trajectories=trajectories)])


def use(model: Any, kernel: str) -> None:
    """Give a model one of the learner's attention kernels."""
    if KERNELS[kernel].packed:
        register(kernel)
    model.set_attn_implementation(KERNELS[kernel].implementation)


def measure(bench: Bench, *, limit_s: float = LIMIT_S) -> dict[str, list[Found]]:
    """Run all parts, and return their lines by name; a part that fails is a line, and none begins when too little time is left."""
    begin, found = time.perf_counter(), dict[str, list[Found]]()
    for name, piece in bench.pieces().items():
        lines = found.setdefault(name, [])
        if time.perf_counter() - begin > 0.8 * limit_s:
            lines.append(Found(name=name, value="left out, no time", met=False))
            continue
        try:
            lines.extend(piece())
        except Exception as error:  # the others are worth having
            reason = next(iter(str(error).strip().splitlines()), "")
            lines.append(Found(name=name, value=f"failed: {type(error).__name__}: {reason}", met=False))
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    bench.close()
    return found


TITLES = {
    "doctor": "The machine",
    "speed": "Speed of the learner",
    "memory": "Memory of the learner against `agentrl plan`",
    "shared_prompts": "Shared prompts",
    "demo_transformers": "`make demo` with the engine of transformers",
    "demo_vllm": "`make demo` with vLLM",
    "adam": "The optimizer in CPU memory",
}


def page(found: Mapping[str, list[Found]], device: str) -> str:
    """Return the figures as a page: what it ran on, what missed its target or did not run, and a table for each part."""
    versions = {
        name: version for name, version in installed().items() if name in ("python", "torch", "transformers", "deepspeed", "vllm", "ray")
    }
    missed = [line.name for lines in found.values() for line in lines if not line.met]
    text = [
        f"# `make gpu` on {device}",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}; {', '.join(f'{name} {version}' for name, version in versions.items())}.",
        "",
        f"Missed or not run: {', '.join(missed)}." if missed else "Every target was met.",
    ]
    for name, lines in found.items():
        rows = [
            f"| {cell(line.name)} | {cell(line.value)} | {line.target and line.target + ('' if line.met else ', MISSED')} |"
            for line in lines
        ]
        text += ["", f"## {TITLES.get(name, name)}", "", "| what | result | target |", "|---|---|---|", *rows]
    return "\n".join([*text, ""])


def cell(text: str) -> str:
    """Return a text as it stands in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Measure, or say that there is nothing to measure on; the code is 1 if something failed or missed its target."""
    if not torch.cuda.is_available():
        print("no GPU: torch finds none on this machine, so nothing was measured")
        if not torch.version.cuda:
            print(f"torch {torch.__version__} is built without CUDA; name another Python with make gpu GPU_PYTHON=python3")
        return 0
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    found = measure(Bench(replace(FULL), device))
    report = page(found, name)
    REPORT.write_text(report, encoding="utf-8")
    print(report)
    return 0 if all(line.met for lines in found.values() for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
