"""``agentrl translate``: a real shape of each system's commands becomes a command that agentrl reads, and a file that says the same."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.foreign import read_launch
from agentrl.config.load import read_flags
from agentrl.config.methods import METHODS
from agentrl.resolve import tune
from agentrl.resolve.commands import TRAIN

OPENRLHF = r"""
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --ckpt.output_dir ./checkpoint/dpo \
   --ckpt.save_steps -1 \
   --train.batch_size 256 \
   --model.beta 0.2 \
   --model.model_name_or_path some/model \
   --data.dataset some/pairs \
   --data.chosen_key yes \
   --lr_warmup_ratio 0 \
   --use_ms
EOF
    # --ds.packing_samples
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
TRL = '''
"""Train on sums."""
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

STEPS = 100

def accuracy(completions, **kwargs):
    return [1.0] * len(completions)

args = GRPOConfig(
    output_dir="out", per_device_train_batch_size=16, num_generations=8, max_steps=STEPS, beta=0.04, loss_type="dr_grpo",
    bf16=torch.cuda.is_available(), report_to="none", use_vllm=True, vllm_mode="colocate",
)
trainer = GRPOTrainer(
    model="some/model", args=args, reward_funcs=accuracy, train_dataset=load_dataset("some/data", split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=64, target_modules=["q_proj", "v_proj"]),
)
'''
VERL = r"""
set -x
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/qwen"}
ALGORITHM=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
)
python3 -m verl.trainer.main_ppo \
    "${ALGORITHM[@]}" \
    data.train_files="['data/a.parquet', 'data/b.parquet']" \
    data.train_batch_size=1024 \
    actor_rollout_ref.model.path=${MODEL_PATH} \
    +actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.val_before_train=False \
    trainer.save_freq=-1 $@
"""
PRIME_RL = """
max_steps = 200
seq_len = 4096

[ckpt]

[deployment]
num_train_gpus = 2
num_infer_gpus = 6

[model]
name = "some/model"

[trainer.optim]
lr = 1e-5

[trainer.model.lora]
rank = 8
target_modules = ["q_proj", "v_proj"]

[orchestrator]
batch_size = 512
group_size = 16

[[orchestrator.train.source]]
name = "wiki-search"

[orchestrator.train.source.env.taskset]
id = "wiki-search"
min_turns = 3
"""
SKYRL = r"""
: "${NUM_GPUS:=4}"
uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$HOME/data/train.parquet']" \
  trainer.algorithm.advantage_estimator="grpo" \
  trainer.policy.model.path="some/model" \
  trainer.placement.colocate_all=true \
  trainer.placement.policy_num_gpus_per_node=4 \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=16 \
  trainer.algorithm.use_kl_loss=false \
  trainer.strategy=fsdp \
  generator.n_samples_per_prompt=4 \
  generator.inference_engine.num_engines=4 \
  environment.env_class=gsm8k \
  trainer.eval_interval=5 \
  $@
"""
CASES: dict[str, tuple[str, str, str, dict[str, Any], dict[str, str]]] = {
    "openrlhf": (
        "run.sh",
        OPENRLHF,
        "dpo",
        {"data": "some/pairs", "beta": 0.2, "chosen_key": "yes", "batch_size": 256, "model": "some/model", "learning_rate": 1e-5,
         "max_length": 512, "zero_stage": 2, "lr_schedule": "cosine", "min_lr_ratio": 0.1, "run_dir": "checkpoint/dpo", "num_epochs": 1.0},
        {"--use_ms": "models are directories or names of Hugging Face"},
    ),
    "trl": (
        "train.py",
        TRL,
        "train",
        {"model": "some/model", "prompts": "some/data", "prompt_split": "train", "n_samples_per_prompt": 8, "groups_per_step": 2,
         "num_steps": 100, "init_kl_coef": 0.04, "use_kl_loss": True, "kl_estimator": "k3", "loss_aggregation": "constant", "lora_rank": 16,
         "lora_alpha": 64, "lora_target_modules": "q_proj,v_proj", "colocate": True, "engine": "vllm", "learning_rate": 1e-6,
         "lr_schedule": "linear", "max_new_tokens": 512, "adam_betas": [0.9, 0.999],
         "off_policy": "seq-mask-tis", "gradient_checkpointing": True, "run_dir": "out"},
        {"--reward-funcs": "name the file of the function with --agent FILE.py", "--bf16": "its value is computed in the file"},
    ),
    "verl": (
        "run.sh",
        VERL,
        "train",
        {"prompts": "data/a.parquet,data/b.parquet", "model": "$HOME/models/qwen", "advantage_estimator": "group_norm",
         "groups_per_step": 1024,
         "n_samples_per_prompt": 5, "mini_batches": 8, "learning_rate": 2e-6, "use_kl_loss": True,
         "init_kl_coef": 0.002, "kl_estimator": "k3",
         "num_learners": 8, "num_engines": 4, "tensor_parallel_size": 2, "colocate": True, "dual_clip": 3.0, "weight_decay": 0.01,
         "adam_betas": [0.9, 0.999], "max_new_tokens": 512},
        {"actor_rollout_ref.rollout.name": "none of vllm, transformers"},
    ),
    "prime_rl": (
        "rl.toml",
        PRIME_RL,
        "train",
        {"model": "some/model", "agent": "verifiers:wiki-search", "num_steps": 200, "max_episode_tokens": 4096, "num_learners": 2,
         "num_engines": 6, "learning_rate": 1e-5, "weight_decay": 0.01, "lora_rank": 8, "lora_target_modules": "q_proj,v_proj",
         "groups_per_step": 32, "n_samples_per_prompt": 16, "max_staleness": 8, "save_every": 50, "advantage_estimator": "dr_grpo",
         "policy_loss": "dppo_tv", "adam_betas": [0.9, 0.999], "flat_groups": "drop", "gradient_checkpointing": True},
        {"orchestrator.train.source.env.taskset.min_turns": "arguments of the environment stand behind its name: "
         "--agent verifiers:NAME?ARGUMENT=VALUE"},
    ),
    "skyrl": (
        "run_gsm8k.sh",
        SKYRL,
        "train",
        {"prompts": "$HOME/data/train.parquet", "model": "some/model", "agent": "skyrl:gsm8k", "advantage_estimator": "group_norm",
         "groups_per_step": 64, "mini_batches": 4, "n_samples_per_prompt": 4, "num_learners": 4, "num_engines": 4, "colocate": True,
         "eval_every": 5, "learning_rate": 1e-6, "weight_decay": 0.01, "max_new_tokens": 1024, "max_turns": 1, "kl_estimator": "k3",
         "adam_betas": [0.9, 0.999]},
        {},
    ),
}  # fmt: skip
"""System -> name of the file, its text, command here, its settings, and what has no counterpart."""


def translated(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], dict[str, Any], dict[str, str]]:
    """The exit code, the command, the file, and what has no counterpart."""
    code = main(["translate", *words])
    command, _, rest = capsys.readouterr().out.partition("\n\n# The same as a file for --config\n")
    text, _, lists = rest.partition("\n\n#")
    missing = dict(line[4:].split(": ", 1) for line in lists.partition("No counterpart\n")[2].splitlines())
    return (
        code,
        shlex.split(command.replace("\\\n", " "), comments=True),
        tomllib.loads(text),
        {name.partition(" ")[0]: why for name, why in missing.items()},
    )


@pytest.mark.parametrize("system", CASES)
def test_a_real_shape_of_each_system(system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, text, command, settings, missing = CASES[system]
    (tmp_path / name).write_text(text)
    code, words, file, found = translated(capsys, str(tmp_path / name))
    assert (words[:2], file, found, code) == (["agentrl", command], settings, missing, int(bool(missing)))
    of = tune.command_of(command) if command in METHODS else TRAIN
    again = tmp_path / "again.toml"
    assert main(["translate", str(tmp_path / name), "--output", str(again)]) == code
    by_flags, by_file = read_flags(of, words[2:]), read_flags(of, ["--config", str(again)])
    assert by_flags.settings == by_file.settings
    assert set(by_flags.sources) == set(by_file.sources) == set(settings)


def test_a_command_in_quotes_and_yaml_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "model_name_or_path: some/model\ndataset_name: some/chats\nlearning_rate: 0.0001\nlr_scheduler_type: cosine\nreport_to: none\n"
    )
    code, words, file, _ = translated(capsys, f"accelerate launch --num_processes 4 -m trl sft --config {path} --max_length 2048")
    assert (code, words[:2], file["num_ranks"], file["batch_size"], file["max_length"]) == (0, ["agentrl", "sft"], 4, 32, 2048)
    _, words, file, _ = translated(capsys, str(path))
    assert (words[:2], file["lr_schedule"], file["data"]) == (["agentrl", "sft"], "cosine", "some/chats")
    _, words, file, _ = translated(capsys, str(path), "--to", "dpo")
    assert (words[:2], file["num_epochs"]) == (["agentrl", "dpo"], 3.0)


def test_yaml_of_verl_and_of_its_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text("data:\n  train_batch_size: 64\nalgorithm:\n  adv_estimator: rloo\nactor_rollout_ref:\n  rollout:\n    n: 4\n")
    _, words, file, _ = translated(capsys, str(path))
    assert (words[:2], file["advantage_estimator"], file["groups_per_step"]) == (["agentrl", "train"], "rloo", 64)
    assert "mini_batches" not in file  # an update there has 256 prompts at most
    command = (
        "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet model.partial_pretrain=m optim.lr=1e-4"
    )
    _, words, file, _ = translated(capsys, command)
    assert (words[:2], file["data"], file["model"], file["learning_rate"]) == (["agentrl", "sft"], "a.parquet", "m", 1e-4)


def test_ray_jobs_and_quotes_of_a_shell() -> None:
    launch = read_launch(
        'ray job submit --address="http://127.0.0.1:8265" --runtime-env-json=\'{"a": 1}\' -- python3 -m openrlhf.cli.train_ppo_ray '
        "--data.input_template $'User: {}\\nAssistant: ' --algo.dynamic_filtering_range -1 1 --vllm.enable_sleep"
    )
    assert launch.program == "openrlhf.cli.train_ppo_ray"
    assert launch.given == {
        "--data.input_template": ["User: {}\nAssistant: "],
        "--algo.dynamic_filtering_range": ["-1", "1"],
        "--vllm.enable_sleep": [],
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("echo hello", "holds no settings of another system"),
        ("program --gibberish 1", "is of no known system"),
        ("missing.sh", "holds no settings"),
    ],
)
def test_what_is_no_command_of_another_system(source: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", source]) == 2
    assert message in capsys.readouterr().err


def test_settings_that_do_not_go_together_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "trl grpo --num_generations 8 --learning_rate -1"]) == 1
    assert "#   together: --learning-rate = -1.0" in capsys.readouterr().out
