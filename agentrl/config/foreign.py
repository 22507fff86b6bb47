"""Flags of other systems that are no settings here: one line each that says what takes their place.

Flags with the same meaning under another name are aliases, in `agentrl.config.load.ALIASES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

OPENRLHF: Mapping[str, str] = {
    "--agent-func-path": "--agent",
    "--train-batch-size": "a step trains on --groups-per-step tasks; --mini-batches splits it into several updates",
    "--micro-train-batch-size": "--micro-batch-tokens counts tokens, not episodes",
    "--micro-rollout-batch-size": "not needed: vLLM batches requests; --max-num-seqs bounds them",
    "--use-dynamic-batch": "always so: micro-batches are made by --micro-batch-tokens",
    "--rollout-max-tokens-per-gpu": "--micro-batch-tokens holds for all passes",
    "--prompt-max-len": "--max-episode-tokens bounds prompt and answers together; a prompt without room is an error before the run",
    "--max-samples": "--num-steps bounds the run",
    "--num-episodes": "--num-steps bounds the run; data are repeated in a new order as often as needed",
    "--packing-samples": "always so: nothing is padded where the model allows it",
    "--load-checkpoint": "--resume RUN_DIR, or --resume auto",
    "--save-path": "--run-dir; the model is written to RUN_DIR/model",
    "--ckpt-path": "--run-dir; checkpoints are written to RUN_DIR/checkpoints",
    "--save-hf-ckpt": "`agentrl export RUN_DIR OUT` writes the model of any checkpoint",
    "--logging-steps": "every step is logged",
    "--use-wandb": "--wandb-project NAME, with WANDB_API_KEY in the environment",
    "--actor-num-nodes": "--num-learners counts ranks over all nodes; --ray-address joins a cluster",
    "--ref-num-nodes": "the reference model shares the learner's devices",
    "--ref-num-gpus-per-node": "the reference model shares the learner's devices",
    "--critic-num-nodes": "the critic shares the learner's devices",
    "--critic-num-gpus-per-node": "the critic shares the learner's devices",
    "--reward-num-nodes": "--remote-rm-url names a server or a file that judges",
    "--reward-num-gpus-per-node": "--remote-rm-url names a server or a file that judges",
    "--reward-pretrain": "--remote-rm-url names a server or a file that judges",
    "--colocate-all-models": "--colocate puts engine i and learner rank i on one GPU",
    "--colocate-actor-ref": "always so",
    "--vllm-sync-backend": "chosen by itself: NCCL, CUDA IPC with --colocate, shared memory without GPUs",
    "--vllm-enable-sleep": "no counterpart; lower --gpu-memory-utilization when engines and learners share a GPU",
    "--deepspeed-enable-sleep": "no counterpart; --optimizer-offload frees GPU memory",
    "--fsdp2-enable-sleep": "no counterpart; --optimizer-offload frees GPU memory",
    "--ring-attn-size": "no counterpart: a sequence is trained on one rank",
    "--ring-head-stride": "no counterpart: a sequence is trained on one rank",
    "--ds-tensor-parallel-size": "no counterpart: --zero-stage 3 spreads a model over ranks",
    "--param-dtype": "--learner-dtype float32 or bfloat16, and --engine-dtype",
    "--bf16": "--learner-dtype bfloat16; it is the default on GPUs",
    "--flash-attn": "--attn-implementation flash_attention_2",
    "--enable-vllm-is-correction": "the default here: --off-policy tis",
    "--enable-prefix-caching": "always so",
    "--normalize-reward": "advantages are normalised: --advantage-std-norm",
    "--eps-clip-low-high": "--eps-clip-low and --eps-clip-high",
    "--lambd": "--gae-lambda",
    "--gradient-checkpointing-use-reentrant": "not needed",
    "--lora-rank": "no counterpart yet: all parameters are trained",
    "--lora-alpha": "no counterpart yet: all parameters are trained",
}

TRL: Mapping[str, str] = {
    "--reward-funcs": "--agent FILE.py with a reward function",
    "--per-device-train-batch-size": "--groups-per-step times --n-samples-per-prompt make a step; --micro-batch-tokens bounds memory",
    "--gradient-accumulation-steps": "not needed: --micro-batch-tokens splits a step of any size",
    "--generation-batch-size": "--groups-per-step times --n-samples-per-prompt",
    "--steps-per-generation": "--mini-batches updates per batch",
    "--max-prompt-length": "--max-episode-tokens bounds prompt and answers together",
    "--loss-type": "--advantage-estimator (group_norm, dr_grpo, ...) with --policy-loss and --loss-aggregation",
    "--scale-rewards": "--advantage-estimator group_norm divides by the standard deviation, dr_grpo does not",
    "--importance-sampling-level": "--policy-loss gspo works on sequences, ppo on tokens",
    "--mask-truncated-completions": "--stop-properly-penalty changes the reward of episodes that were cut",
    "--use-vllm": "always so",
    "--vllm-mode": "--colocate, or engines of their own",
    "--vllm-importance-sampling-correction": "the default here: --off-policy tis",
    "--num-train-epochs": "--num-steps bounds the run",
    "--report-to": "--tensorboard, --wandb-project",
    "--reward-weights": "agentrl.combine_rewards in the file that --agent names",
    "--use-peft": "no counterpart yet: all parameters are trained",
}

VERL: Mapping[str, str] = {
    "algorithm.adv_estimator": "--advantage-estimator",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--gae-lambda",
    "algorithm.kl_ctrl.kl_coef": "--init-kl-coef",
    "algorithm.use_kl_in_reward": "--init-kl-coef above 0 does so; --use-kl-loss puts the penalty into the loss",
    "data.train_files": "--prompts",
    "data.val_files": "--eval-prompts",
    "data.train_batch_size": "--groups-per-step",
    "data.prompt_key": "--input-key",
    "data.max_prompt_length": "--max-episode-tokens bounds prompt and answers together",
    "data.max_response_length": "--max-new-tokens",
    "actor_rollout_ref.model.path": "--model",
    "actor_rollout_ref.rollout.n": "--n-samples-per-prompt",
    "actor_rollout_ref.rollout.name": "always vLLM",
    "actor_rollout_ref.rollout.temperature": "--temperature",
    "actor_rollout_ref.rollout.top_p": "--top-p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--tensor-parallel-size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "--gpu-memory-utilization",
    "actor_rollout_ref.actor.optim.lr": "--learning-rate",
    "actor_rollout_ref.actor.clip_ratio": "--eps-clip-low and --eps-clip-high",
    "actor_rollout_ref.actor.clip_ratio_low": "--eps-clip-low",
    "actor_rollout_ref.actor.clip_ratio_high": "--eps-clip-high",
    "actor_rollout_ref.actor.clip_ratio_c": "--dual-clip",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "--mini-batches splits a step into updates",
    "actor_rollout_ref.actor.ppo_epochs": "--ppo-epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "--micro-batch-tokens",
    "actor_rollout_ref.actor.use_kl_loss": "--use-kl-loss",
    "actor_rollout_ref.actor.kl_loss_coef": "--init-kl-coef",
    "actor_rollout_ref.actor.kl_loss_type": "--kl-estimator k1, k2 or k3",
    "actor_rollout_ref.actor.entropy_coeff": "--entropy-coef",
    "actor_rollout_ref.actor.loss_agg_mode": "--loss-aggregation",
    "custom_reward_function.path": "--agent FILE.py",
    "trainer.total_training_steps": "--num-steps",
    "trainer.total_epochs": "--num-steps bounds the run",
    "trainer.save_freq": "--save-every",
    "trainer.test_freq": "--eval-every",
    "trainer.default_local_dir": "--run-dir",
    "trainer.logger": "--tensorboard, --wandb-project",
    "trainer.n_gpus_per_node": "--num-learners and --num-engines count GPUs over all nodes",
    "trainer.nnodes": "--num-learners and --num-engines count GPUs over all nodes",
}

ANSWERS: Mapping[str, tuple[str, str]] = {
    **{name: ("verl", answer) for name, answer in VERL.items()},
    **{name: ("TRL", answer) for name, answer in TRL.items()},
    **{name: ("OpenRLHF", answer) for name, answer in OPENRLHF.items()},
}
"""Flag, or key of verl -> the system that it belongs to, and what takes its place here."""


def answers(words: Sequence[str], known: Iterable[str]) -> list[tuple[str, str]]:
    """Return each word that is no flag of ours with one line that says what to write instead.

    Args:
        words: Command-line words, aliases replaced already.
        known: Our flags, with ``--`` and with ``-`` between words.
    """
    flags = sorted(known)
    unknown = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and len(name) > 2:
            name = name.replace("_", "-")
            if name not in flags:
                unknown.append((name, _answer(name, flags)))
        elif "=" in word and name.lstrip("+") in VERL:
            unknown.append((name, _answer(name.lstrip("+"), flags)))
    return unknown


def _answer(name: str, flags: Sequence[str]) -> str:
    if name in ANSWERS:
        system, answer = ANSWERS[name]
        return f"{system}; here: {answer}"
    near = difflib.get_close_matches(name, flags, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "unknown; `agentrl train --help all` lists every setting"
