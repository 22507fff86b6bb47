"""The commands that OpenRLHF's README shows, with models and data of ours in the places of its own, as a machine with 8 GPUs reads them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.cases import Case
from tests.golden.record import Recorder

ROWS = "".join(json.dumps({"question": f"What is {n}+1?", "response": str(n + 1), "answer": str(n + 1)}) + "\n" for n in range(600))
PAIRS = "".join(json.dumps({"prompt": f"What is {n}+1?", "chosen": str(n + 1), "rejected": str(n)}) + "\n" for n in range(600))
REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(q.endswith(l)) for q, l in zip(queries, labels)]}\n"
FILES = {"data/qa.jsonl": ROWS, "data/preferences.jsonl": PAIRS, "reward_func.py": REWARD}
MODEL = "models/smollm2"

SFT = rf"""
   --data.max_len 4096 --data.dataset data/qa.jsonl --data.input_key question --data.output_key response
   --data.input_template 'User: {{}} Assistant: ' --train.batch_size 256 --train.micro_batch_size 2 --data.max_samples 500000
   --actor.model_name_or_path {MODEL} --ckpt.output_dir ./checkpoint/sft --ckpt.save_steps -1 --logger.logging_steps 1
   --eval.steps -1 --ds.zero_stage 2 --train.max_epochs 1 --ds.packing_samples --ds.param_dtype bf16 --adam.lr 5e-6
   --actor.gradient_checkpointing_enable --logger.wandb.key TOKEN
"""
REWARD_MODEL = rf"""
   --ckpt.output_dir ./checkpoint/rm --ckpt.save_steps -1 --logger.logging_steps 1 --eval.steps -1 --train.batch_size 256
   --train.micro_batch_size 1 --actor.model_name_or_path {MODEL} --ds.param_dtype bf16 --train.max_epochs 1 --data.max_len 8192
   --ds.zero_stage 3 --adam.lr 9e-6 --data.dataset data/preferences.jsonl --data.apply_chat_template --chosen_key chosen
   --rejected_key rejected --ds.packing_samples --actor.gradient_checkpointing_enable --logger.wandb.key TOKEN
"""
HYBRID = rf"""
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 --reward.num_nodes 1 --reward.num_gpus_per_node 8 --critic.num_nodes 1
   --critic.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2
   --train.colocate_all --vllm.gpu_memory_utilization 0.5 --actor.model_name_or_path {MODEL}
   --reward.model_name_or_path helpful --ckpt.output_dir runs/final --ckpt.path runs/ckpt --ckpt.save_hf --train.batch_size 128
   --rollout.batch_size 1024 --train.dynamic_batch_enable --rollout.n_samples_per_prompt 1 --train.max_epochs 1 --prompt_max_len 1024
   --data.max_samples 100000 --generate_max_len 1024 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7
   --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --data.prompt_dataset data/qa.jsonl --data.input_key question
   --data.apply_chat_template --reward.normalize_enable --actor.gradient_checkpointing_enable --ds.packing_samples
   --vllm.sync_backend nccl --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep --logger.wandb.key TOKEN
"""
FUNCTION = rf"""
  --actor.model_name_or_path {MODEL} --train.dynamic_batch_enable --reward.remote_url reward_func.py --data.label_key answer
  --data.prompt_dataset data/qa.jsonl --data.input_key question
"""
AGENT = r"""
  --train.dynamic_batch_enable --train.agent_func_path envs/arithmetic.py --train.async_enable
"""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def dry_run(recorder: Recorder, command: str, text: str, machine: str = "gpu8") -> tuple[Any, list[str]]:
    case = Case(name="", words=(command, *shlex.split(text), "--dry-run"), files=FILES, machine=machine)
    with recorder._prepared(case):
        result, settings = recorder._dry_run(case)
    assert result["code"] == 0, result
    return settings, result["errors"]


def test_supervised_training(recorder: Recorder) -> None:
    plan, lines = dry_run(recorder, "sft", SFT)
    assert (plan["optim"]["batch_size"], plan["data"]["max_length"], plan["optim"]["learning_rate"]) == (256, 4096, 5e-6)
    assert (plan["data"]["prompt_key"], plan["data"]["completion_key"]) == ("question", "response")
    assert sum(line.startswith("agentrl: words of OpenRLHF: ") for line in lines) == 1


def test_a_reward_model(recorder: Recorder) -> None:
    plan, _ = dry_run(recorder, "reward-model", REWARD_MODEL)
    assert (plan["optim"]["zero_stage"], plan["data"]["max_length"], plan["track"]["sink"]) == (3, 8192, ["wandb:openrlhf"])


def test_ppo_with_engines_on_the_gpus_of_the_learner(recorder: Recorder) -> None:
    plan, _ = dry_run(recorder, "train", HYBRID, "gpu16")
    assert (plan["flow"]["groups_per_step"], plan["sampling"]["n_samples_per_prompt"], plan["algo"]["mini_batches"]) == (1024, 1, 8)
    assert (plan["algo"]["advantage_estimator"], plan["learner"]["critic_learning_rate"], plan["algo"]["init_kl_coef"]) == (
        "gae",
        9e-6,
        0.01,
    )
    assert (plan["learner"]["num_learners"], plan["engine"]["num_engines"], plan["weights"]["colocate"]) == (8, 4, True)
    assert (plan["training"]["num_steps"], plan["reward"]["reward_model"], plan["run"]["agent"]) == (1, ["WORK/helpful"], "answer:")


def test_a_reward_function(recorder: Recorder) -> None:
    plan, _ = dry_run(recorder, "train", FUNCTION, "gpu2")
    assert (plan["data"]["label_key"], plan["data"]["remote_rm_url"]) == ("answer", "reward_func.py")


def test_an_asynchronous_agent(recorder: Recorder) -> None:
    plan, _ = dry_run(recorder, "train", AGENT, "cpu")
    assert plan["flow"]["max_staleness"] == 1
