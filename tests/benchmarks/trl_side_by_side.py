"""agentrl and TRL's GRPOTrainer on the same task, on the CPU: episodes per second, and time to a reward.

    python -m tests.benchmarks.trl_side_by_side [--task rules|bare] [--seeds 1 2 3] [--steps N] [--systems NAME ...]

Both train the bundled model in float32 on the questions of ``envs/arithmetic.py``, as chat messages, alone (``bare``, 11 tokens) or
after a system prompt (``rules``, 176 tokens in all; `tests.benchmarks._rules`): the same reward, 16
questions with 8 answers each a step, one update a step, at most 8 tokens an answer, group-normalised advantages, the clipped loss as
a mean over tokens, the same AdamW. Every run is a process of its own; they take turns. Start-up is measured apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.assets import tiny_model_path
from agentrl.core.types import Task, as_messages
from agentrl.env.agent import StepState
from agentrl.env.load import load_agent
from tests.e2e.runs import ENVS, ROOT, command

AGENTS = {"rules": f"{Path(__file__).with_name('_rules.py')}:WithRules", "bare": str(ENVS / "arithmetic.py")}
GROUPS, SAMPLES, NEW_TOKENS, LEARNING_RATE = 16, 8, 8, 5e-4
THRESHOLD, WINDOW = 0.9, 5
DEADLINE_S = 900
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class System:
    """What is compared.

    Attributes:
        name: For the table.
        flags: For ``agentrl train``; `None`: TRL.
        threads: OpenMP threads of a process.
        options: For `GRPOConfig`.
    """

    name: str
    flags: tuple[str, ...] | None
    threads: int
    options: str = "{}"


SYSTEMS = {
    "trl": System(f"TRL, {CORES} threads", None, CORES),
    "trl-1": System("TRL, 1 thread", None, 1),
    "trl-micro": System(
        f"TRL, {CORES} threads, micro-batches of 16", None, CORES, '{"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8}'
    ),
    "trl-cb": System("TRL, continuous batching", None, CORES, '{"use_transformers_continuous_batching": true}'),
    "sync": System(f"agentrl, synchronous, {CORES} threads", (), CORES),
    "async": System("agentrl, `--async`, 1 thread a process", ("--async",), 1),
    "sync-tf": System("agentrl, synchronous, `--engine transformers`, 1 thread a process", ("--engine", "transformers"), 1),
    "async-tf": System("agentrl, `--async`, `--engine transformers`, 1 thread a process", ("--async", "--engine", "transformers"), 1),
    "local-tf": System(
        "agentrl, synchronous, `--engine transformers --runtime local`, 1 thread each",
        ("--engine", "transformers", "--runtime", "local"),
        1,
    ),
}


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        rewards: Mean reward of every step.
        times: Seconds from the begin of training to the end of every step.
        start_s: Seconds from the command to the begin of training, and from its end to that of the process.
    """

    rewards: list[float]
    times: list[float]
    start_s: float

    @property
    def episodes_per_s(self) -> float:
        """Over the whole training."""
        return len(self.times) * GROUPS * SAMPLES / self.times[-1]

    @property
    def to_threshold_s(self) -> float | None:
        """Time until the mean of some steps in a row first reached the threshold."""
        return next((self.times[i] for i in range(WINDOW - 1, len(self.times)) if self.recent(i) >= THRESHOLD), None)

    def recent(self, step: int) -> float:
        """Mean reward of the steps up to one."""
        return statistics.fmean(self.rewards[step - WINDOW + 1 : step + 1])


def run(system: System, task: str, seed: int, steps: int) -> Result:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if system.flags is None:
            words = [
                sys.executable,
                "-m",
                "tests.benchmarks.trl_side_by_side",
                "--child",
                folder,
                "--task",
                task,
                "--options",
                system.options,
            ]
            words += ["--seeds", str(seed), "--steps", str(steps)]
        else:
            sizes = ("--groups-per-step", GROUPS, "--n-samples-per-prompt", SAMPLES, "--max-new-tokens", NEW_TOKENS)
            rest = ("--learning-rate", LEARNING_RATE, "--seed", seed, "--num-steps", steps, "--record", "none", "--no-save-model")
            words = command("train", "--agent", AGENTS[task], "--run-dir", f"{folder}/run", *map(str, (*sizes, *rest)), *system.flags)
        begin = time.perf_counter()
        # Nothing is looked up on the network: everything is local.
        env = {**os.environ, "OMP_NUM_THREADS": str(system.threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"{system.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return read(Path(folder), seconds)


def read(folder: Path, seconds: float) -> Result:
    """What a run left."""
    metrics = next(folder.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [float(row["time_s"]) for row in rows]
    return Result([float(row["reward/mean"]) for row in rows], times, seconds - times[-1])


def trl_config(folder: Path, seed: int, steps: int, options: dict[str, Any]) -> Any:
    """The settings above in TRL's words."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over the tokens of the batch
        scale_rewards="group",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"per_device_train_batch_size": GROUPS * SAMPLES, "gradient_accumulation_steps": 1, **options},
    )


def train_with_trl(folder: Path, task: str, seed: int, steps: int, options: dict[str, Any]) -> None:
    """GRPOTrainer with the settings above; metrics go to `folder`."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from trl import GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    env = load_agent(AGENTS[task]).load()
    tasks: list[Task] = list(env.tasks())
    rewards: list[float] = []

    def reward(completions: list[Any], label: list[int], **_: Any) -> list[float]:
        """The environment's own judgement."""
        states = [StepState(action_text=c[0]["content"], label=answer) for c, answer in zip(completions, label, strict=True)]
        values = [float(env().step(state).reward) for state in states]
        rewards.append(statistics.fmean(values))
        return values

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Writes down when steps end."""

        def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
            row = {"time_s": time.perf_counter() - self.begin, "reward/mean": rewards[-1]}
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    data = Dataset.from_list([{"prompt": as_messages(task.prompt), "label": task.label} for task in tasks])
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path()))
    config = trl_config(folder, seed, steps, options)
    trainer = GRPOTrainer(
        model=str(tiny_model_path()), reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()


def table(results: dict[str, list[Result]]) -> str:
    """Markdown; ratios are to the best of TRL's runs with the same seed, medians over the seeds."""
    lines = [
        f"| | episodes/s | ratio | seconds to a reward of {THRESHOLD} | ratio | reward, last {WINDOW} steps | start-up and end, s |",
        "|---|---|---|---|---|---|---|",
    ]
    theirs = list(zip(*(runs for name, runs in results.items() if SYSTEMS[name].flags is None), strict=True))
    for name, runs in results.items():
        speed = [run.episodes_per_s / max(r.episodes_per_s for r in trl) for run, trl in zip(runs, theirs, strict=False)]
        best = [min(filter(None, (r.to_threshold_s for r in trl)), default=None) for trl in theirs]
        ratios = [b / run.to_threshold_s for run, b in zip(runs, best, strict=False) if run.to_threshold_s and b]
        cells = (
            _each([r.episodes_per_s for r in runs], 0),
            _ratio(speed),
            _each([r.to_threshold_s for r in runs], 1),
            _ratio(ratios),
            _each([r.recent(len(r.rewards) - 1) for r in runs], 2),
            _each([r.start_s for r in runs], 0),
        )
        lines.append(f"| {SYSTEMS[name].name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else ""


def _each(values: Sequence[float | None], digits: int) -> str:
    return ", ".join("never" if value is None else f"{value:.{digits}f}" for value in values)


def main() -> None:
    """Compare, or be one of TRL's runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(AGENTS), default="rules", help="with a system prompt, or without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=["trl", "sync", "async"])
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train_with_trl(options.child, options.task, options.seeds[0], options.steps, options.options)
        return
    print(f"task {options.task}, {options.steps} steps of {GROUPS} x {SAMPLES} episodes, seeds {options.seeds}, {CORES} cores")
    results: dict[str, list[Result]] = {name: [] for name in options.systems}
    for seed in options.seeds:
        for name in options.systems:
            result = run(SYSTEMS[name], options.task, seed, options.steps)
            results[name].append(result)
            print(f"  {name}, seed {seed}: {result.episodes_per_s:.0f} episodes/s, load {os.getloadavg()[0]:.1f}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
