"""`agentrl sft` and `agentrl dpo` beside TRL's trainers and a plain loop of transformers: seconds, CPU seconds and peak memory.

    python -m tests.benchmarks.tune_side_by_side --model models/smollm2 [--tasks sft dpo] [--steps N] [--rounds N] [--rows N]

All train the same rows in the same order in float32, by AdamW. Chats have 30 to 900 tokens, of which the answers are trained; pairs have
prompts of about 200 tokens and answers of 30 to 160. TRL pads micro-batches of 4 rows, or of 2 pairs, without gradient checkpointing; the
plain loop fills 2 rows of 1,024 tokens for an update, trains all of them, and shuffles nothing. Every run is a process of its own; they
take turns. The first of several steps of each is a warm-up. CPU seconds are those of all threads of the process, which other work on the
machine changes less than seconds; memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.e2e.runs import ROOT

CORES = len(os.sched_getaffinity(0))
DEADLINE_S = 3000
LONGEST = 1024
RATE = 1e-5
TEXT = """the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up other about
out many then them these so some her would make like him into time has look two more write go see number no
way could people my than first water been call who oil its now find long down day did get"""
WORDS = TEXT.split()
CONTESTANTS = {"sft": ("agentrl", "trl", "plain"), "dpo": ("agentrl", "trl")}


@dataclass
class Clock:
    """Times at the beginning of training and at the ends of steps, and what was read in them.

    Attributes:
        walls: Seconds.
        cpus: CPU seconds of the process.
        tokens: Tokens of the rows of each step, without padding.
        peak_gb: Most memory of the process.
    """

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_gb: float = 0.0

    def tick(self) -> None:
        """Note the beginning of training, or the end of a step."""
        self.walls.append(time.perf_counter())
        self.cpus.append(time.process_time())
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        self.peak_gb = next(int(line.split()[1]) * 1024 / 1e9 for line in status.splitlines() if line.startswith("VmHWM"))

    def rate(self, times: Sequence[float]) -> float:
        """Tokens per second of the steps behind the first, or of the only one."""
        first = int(len(self.tokens) > 1)
        return sum(self.tokens[first:]) / (times[-1] - times[first])


def write_rows(task: str, count: int, path: Path) -> None:
    """Write rows of random words, as messages, the same each time."""
    draw = random.Random(7)

    def said(role: str, low: int, high: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(low, high)))}]

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            if task == "dpo":
                row = {"prompt": said("user", 140, 190)} | {name: said("assistant", 30, 160) for name in ("chosen", "rejected")}
            else:
                # The template writes 35 tokens more; the length of a row is uniform.
                length = draw.randint(30, 900) - 37
                asked = max(1, min(20, length // 8))
                row = {
                    "prompt": said("user", asked, asked),
                    "completion": said("assistant", max(1, length - asked), max(1, length - asked)),
                }
            file.write(json.dumps(row) + "\n")


def lengths(task: str, rows: Sequence[dict[str, Any]], model: str) -> list[int]:
    """Tokens of each row, of pairs those of both sequences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    answers = ("chosen", "rejected") if task == "dpo" else ("completion",)
    texts = [[tokenizer.apply_chat_template(row["prompt"] + row[name], tokenize=False) for name in answers] for row in rows]
    return [sum(len(tokenizer(text)["input_ids"]) for text in each) for each in texts]


def with_agentrl(task: str, options: argparse.Namespace, data: Path, clock: Clock) -> None:
    """The command, called from Python."""
    from agentrl.learner.ranks import Ranks
    from agentrl.tune import tune
    from agentrl.tune.follow import Stop
    from agentrl.tune.loop import Loop

    train = Loop.train

    def timed(*args: Any) -> str:
        clock.tick()
        return train(*args)

    class Ticks(Stop):
        def agreed(self, ranks: Ranks) -> bool:
            clock.tick()
            return super().agreed(ranks)

    rest = {"record_rows": 0, "eval_size": 0, "tensorboard": False, "shuffle": False, "token_cache": "none"}
    sizes = {"num_steps": options.steps, "batch_size": options.rows, "learning_rate": RATE, "lr_schedule": "constant"}
    settings = {"model": options.model, "data": str(data), "run_dir": options.child / "run", "save_every": 0, **sizes, **rest}
    with mock.patch.object(Loop, "train", timed):
        tune(task, stop=Ticks(), **settings, **options.settings)


def with_trl(task: str, options: argparse.Namespace, data: Path, clock: Clock) -> None:
    """TRL's trainer of the method."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    micro = 4 if task == "sft" else 2
    given: dict[str, Any] = {
        "output_dir": str(options.child),
        "max_steps": options.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": options.rows // micro,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "max_length": LONGEST,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options.settings,
    }
    made, trainer = (SFTConfig, SFTTrainer) if task == "sft" else (DPOConfig, DPOTrainer)
    rows = Dataset.from_list(read_rows(data))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer(model=options.model, args=made(**given), train_dataset=rows, processing_class=tokenizer, callbacks=[Ticks()]).train()


def with_plain_loop(task: str, options: argparse.Namespace, data: Path, clock: Clock) -> None:
    """Full rows of `LONGEST` tokens, each of them trained."""
    del task
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    texts = (tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False) for row in itertools.cycle(read_rows(data)))
    stream = itertools.chain.from_iterable(tokenizer(text)["input_ids"] for text in texts)
    clock.tokens = [2 * LONGEST] * options.steps
    clock.tick()
    for _ in range(options.steps):
        batch = torch.tensor([list(itertools.islice(stream, LONGEST)) for _ in range(2)])
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


TRAIN: dict[str, Callable[[str, argparse.Namespace, Path, Clock], None]] = {
    "agentrl": with_agentrl,
    "trl": with_trl,
    "plain": with_plain_loop,
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(name: str, task: str, options: argparse.Namespace) -> None:
    """One run in this process; its times go to `options.child`."""
    import torch

    torch.set_num_threads(options.threads)
    data, clock = options.child / "rows.jsonl", Clock()
    write_rows(task, options.rows * options.steps, data)
    counts = lengths(task, read_rows(data), options.model)
    clock.tokens = [sum(counts[step * options.rows : (step + 1) * options.rows]) for step in range(options.steps)]
    TRAIN[name](task, options, data, clock)
    (options.child / "clock.json").write_text(json.dumps(asdict(clock)), encoding="utf-8")


def run(name: str, task: str, words: Sequence[str], threads: int) -> Clock:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.tune_side_by_side", *words, "--tasks", task, "--child", folder, "--as", name]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return Clock(**json.loads((Path(folder) / "clock.json").read_text(encoding="utf-8")))


def table(task: str, found: dict[str, list[Clock]]) -> str:
    """Markdown; a ratio is agentrl's rate over the other's in the same round, and the median of the rounds."""
    lines = [f"| {task} | tokens/s | tokens per CPU second | agentrl's ratio | by CPU seconds | peak GB |", "|---|---|---|---|---|---|"]
    own = found["agentrl"]
    for name, clocks in found.items():
        walls, cpus = [c.rate(c.walls) for c in clocks], [c.rate(c.cpus) for c in clocks]
        ratios = ["", ""]
        if name != "agentrl":
            ours = [c.rate(c.walls) for c in own], [c.rate(c.cpus) for c in own]
            each = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(ours, (walls, cpus), strict=True)]
            ratios = [f"{statistics.median(part):.2f}" for part in each]
        shown = [f"{statistics.median(walls):.0f}", f"{statistics.median(cpus):.1f}", *ratios, f"{max(c.peak_gb for c in clocks):.2f}"]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Compare, or be one of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of the model: agentrl get-model smollm2 --output models/smollm2")
    parser.add_argument("--tasks", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--contestants", nargs="+", choices=list(TRAIN), default=list(TRAIN))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="steps of a run; the first of several is not measured")
    parser.add_argument("--rows", type=int, default=32, help="rows or pairs of a step")
    parser.add_argument("--threads", type=int, default=CORES, help="of each run")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="further settings of the contestants that are no plain loop, as JSON"
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.name, options.tasks[0], options)
        return
    words = [
        "--model",
        options.model,
        "--steps",
        str(options.steps),
        "--rows",
        str(options.rows),
        "--settings",
        json.dumps(options.settings),
    ]
    words += ["--threads", str(options.threads)]
    print(
        f"{options.model}, {options.steps} steps of {options.rows} rows, {options.rounds} rounds, {options.threads} threads, {CORES} cores",
        flush=True,
    )
    for task in options.tasks:
        found: dict[str, list[Clock]] = {name: [] for name in CONTESTANTS[task] if name in options.contestants}
        for _ in range(options.rounds):
            for name, clocks in found.items():
                clocks.append(run(name, task, words, options.threads))
                wall, cpu = clocks[-1].rate(clocks[-1].walls), clocks[-1].rate(clocks[-1].cpus)
                print(f"  {task} {name}: {wall:.1f} tokens/s, {cpu:.1f} a CPU second, load {os.getloadavg()[0]:.1f}", flush=True)
        print(table(task, found))


if __name__ == "__main__":
    main()
