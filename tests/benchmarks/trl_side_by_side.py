"""agentrl and TRL's GRPOTrainer on the same task: episodes per second, and time to a reward.

    python -m tests.benchmarks.trl_side_by_side [--task rules|bare] [--seeds 1 2 3] [--steps N] [--systems NAME ...]
    python -m tests.benchmarks.trl_side_by_side --task instructions --model models/smollm2 --steps 5 --groups 1 --systems sync-local trl-1
    python -m tests.benchmarks.trl_side_by_side --task pictures --systems trl trl-1 sync async

Both train in float32, on a GPU in bfloat16 with float32 master weights, on the same chat messages, with the same reward, sizes
(`Workload`) and AdamW, one update a step, group-normalised advantages and the clipped loss as a mean over tokens. The tasks ``rules`` and
``bare`` are the questions of ``envs/arithmetic.py`` for the bundled model, after a system prompt (176 tokens in all;
`tests.benchmarks._rules`) or alone (11 tokens); ``instructions`` is the recipe for SmolLM2 (204 tokens on average); ``pictures`` is
``envs/shapes.py`` for the bundled model that reads images, whose vision part both leave as it is. Every run is a process of its own; they
take turns. Start-up is measured apart.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from agentrl.assets import VISION_MODEL, located_model, tiny_model_path
from agentrl.core.types import Task, as_messages
from agentrl.env.agent import StepState
from agentrl.suites.load import load_agent
from tests.e2e.runs import ENVS, ROOT

WINDOW = 5
DEADLINE_S = 900
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and how much at once.

    Attributes:
        agent: For ``--agent``.
        groups: Questions of a step.
        samples: Answers to each.
        new_tokens: Most tokens of an answer.
        learning_rate: Constant.
        temperature: Of sampling, and of the log-probabilities that are trained.
        model: Directory of the model; empty: the bundled chat model.
        threshold: Reward to which the time is measured.
    """

    agent: str
    groups: int = 16
    samples: int = 8
    new_tokens: int = 8
    learning_rate: float = 5e-4
    temperature: float = 1.0
    model: str = ""
    threshold: float = 0.9

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.groups * self.samples


TASKS = {
    "rules": Workload(agent=f"{Path(__file__).with_name('_rules.py')}:WithRules"),
    "bare": Workload(agent=str(ENVS / "arithmetic.py")),
    "instructions": Workload(
        agent=str(ROOT / "examples/recipes/smollm2/instructions.py"), groups=8, new_tokens=32, learning_rate=2e-5, temperature=0.7
    ),
    "pictures": Workload(agent=str(ENVS / "shapes.py"), model=located_model(VISION_MODEL), threshold=0.75),
}


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
    "sync-local": System(f"agentrl, synchronous, `--runtime local`, {CORES} threads", ("--runtime", "local"), CORES),
    "async": System("agentrl, `--async`, 1 thread a process", ("--async",), 1),
    "sync-1": System("agentrl, synchronous, 1 thread a process", (), 1),
    "sync-vllm": System(f"agentrl, synchronous, `--engine vllm`, {CORES} threads", ("--engine", "vllm"), CORES),
    "async-vllm": System("agentrl, `--async`, `--engine vllm`, 1 thread a process", ("--async", "--engine", "vllm"), 1),
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
        episodes: Episodes of a step.
        threshold: Reward to which the time is measured.
        rewards: Mean reward of every step.
        times: Seconds from the begin of training to the end of every step.
        start_s: Seconds from the command to the begin of training, and from its end to that of the process.
    """

    episodes: int
    threshold: float
    rewards: list[float]
    times: list[float]
    start_s: float

    @property
    def episodes_per_s(self) -> float:
        """Over the whole training."""
        return len(self.times) * self.episodes / self.times[-1]

    @property
    def to_threshold_s(self) -> float | None:
        """Time until the mean of some steps in a row first reached the threshold."""
        return next((self.times[i] for i in range(WINDOW - 1, len(self.times)) if self.recent(i) >= self.threshold), None)

    def recent(self, step: int) -> float:
        """Mean reward of the steps up to one."""
        return statistics.fmean(self.rewards[step - WINDOW + 1 : step + 1])


def run(system: System, task: str, work: Workload, seed: int, steps: int) -> Result:
    """One run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        rest = ("--seeds", str(seed), "--steps", str(steps))
        words = [sys.executable, "-m", "tests.benchmarks.trl_side_by_side", "--child", folder, "--task", task, "--model", work.model, *rest]
        words += ["--options", system.options, "--groups", str(work.groups), "--new-tokens", str(work.new_tokens)]
        if system.flags is not None:
            words = [sys.executable, "-m", "agentrl", "train", *agentrl_flags(work, folder, seed, steps), *system.flags]
        begin = time.perf_counter()
        # Nothing is looked up on the network: everything is local.
        env = {**os.environ, "OMP_NUM_THREADS": str(system.threads), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise RuntimeError(f"{system.name} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return read(Path(folder), work, seconds)


def agentrl_flags(work: Workload, folder: str, seed: int, steps: int) -> list[str]:
    """The settings of a workload in agentrl's words."""
    sizes = ("--groups-per-step", work.groups, "--n-samples-per-prompt", work.samples, "--max-new-tokens", work.new_tokens)
    sampling = ("--temperature", work.temperature, "--learning-rate", work.learning_rate, "--seed", seed, "--num-steps", steps)
    rest = ("--agent", work.agent, "--run-dir", f"{folder}/run", "--record", "none", "--no-save-model")
    pretrained = ("--model", work.model, "--max-model-len", 512) if work.model else ()
    return [str(word) for word in (*sizes, *sampling, *rest, *pretrained)]


def read(folder: Path, work: Workload, seconds: float) -> Result:
    """What a run left."""
    metrics = next(folder.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    times = [float(row["time_s"]) for row in rows]
    rewards = [float(row["reward/mean"]) for row in rows]
    return Result(work.episodes, work.threshold, rewards, times, seconds - times[-1])


def trl_config(work: Workload, folder: Path, seed: int, steps: int, options: dict[str, Any]) -> Any:
    """The settings of a workload in TRL's words."""
    import torch
    from trl import GRPOConfig

    on_gpu = torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=steps,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=work.temperature,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # the mean over the tokens of the batch
        scale_rewards="group",
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"per_device_train_batch_size": work.episodes, "gradient_accumulation_steps": 1, **options},
    )


def train_with_trl(folder: Path, work: Workload, seed: int, steps: int, options: dict[str, Any]) -> None:
    """GRPOTrainer with the settings above; metrics go to `folder`."""
    import torch
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoProcessor, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from trl import GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    env = load_agent(work.agent).load()
    tasks: list[Task] = list(env.tasks())
    rewards: list[float] = []

    def reward(completions: list[Any], label: list[int], **_: Any) -> list[float]:
        """The environment's own judgement."""
        states = [StepState(action_text=c[0]["content"], label=tasks[i].label) for c, i in zip(completions, label, strict=True)]
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

    seeing, model = bool(tasks[0].images), work.model or str(tiny_model_path())
    rows: list[dict[str, Any]] = [{"prompt": as_messages(task.prompt), "label": i} for i, task in enumerate(tasks)]
    if seeing:
        rows = [{**row, "images": [Image.fromarray(image) for image in task.images]} for row, task in zip(rows, tasks, strict=True)]
    data, processor = Dataset.from_list(rows), (AutoProcessor if seeing else AutoTokenizer).from_pretrained(model)
    config = trl_config(work, folder, seed, steps, options)
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=data, processing_class=processor, callbacks=[Clock()]
    )
    if seeing:
        trainer.model.get_encoder(modality="image").requires_grad_(False)
    trainer.train()


def table(results: dict[str, list[Result]]) -> str:
    """Markdown; ratios are to the best of TRL's runs with the same seed, medians over the seeds."""
    threshold = next(iter(results.values()))[0].threshold
    lines = [
        f"| | episodes/s | ratio | seconds to a reward of {threshold} | ratio | reward, last {WINDOW} steps | start-up and end, s |",
        "|---|---|---|---|---|---|---|",
    ]
    theirs = list(zip(*(runs for name, runs in results.items() if SYSTEMS[name].flags is None), strict=True))
    for name, runs in results.items():
        speed = [run.episodes_per_s / max(r.episodes_per_s for r in trl) for run, trl in zip(runs, theirs, strict=False)]
        best = [min(filter(None, (r.to_threshold_s for r in trl)), default=None) for trl in theirs]
        ratios = [b / run.to_threshold_s for run, b in zip(runs, best, strict=False) if run.to_threshold_s and b]
        cells = (
            _each([r.episodes_per_s for r in runs], 0 if runs[0].episodes_per_s > 20 else 1),
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
    parser.add_argument("--task", choices=list(TASKS), default="rules")
    parser.add_argument("--model", default="", help="directory of the model; without it the bundled one of the task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=["trl", "sync", "async"])
    parser.add_argument("--groups", type=int, default=0, help="questions of a step, else those of the task")
    parser.add_argument("--new-tokens", type=int, default=0, help="most tokens of an answer, else those of the task")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = TASKS[options.task]
    sizes = {"groups": options.groups or work.groups, "new_tokens": options.new_tokens or work.new_tokens}
    work = dataclasses.replace(work, **sizes, model=options.model or work.model)
    if options.child:
        train_with_trl(options.child, work, options.seeds[0], options.steps, options.options)
        return
    print(f"task {options.task}, {options.steps} steps of {work.groups} x {work.samples} episodes, seeds {options.seeds}, {CORES} cores")
    results: dict[str, list[Result]] = {name: [] for name in options.systems}
    for seed in options.seeds:
        for name in options.systems:
            result = run(SYSTEMS[name], options.task, work, seed, options.steps)
            results[name].append(result)
            print(f"  {name}, seed {seed}: {result.episodes_per_s:.3g} episodes/s, load {os.getloadavg()[0]:.1f}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
