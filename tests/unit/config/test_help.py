"""The help of ``train``, and answers to flags of other systems."""

import pickle

import pytest

from agentrl.config.load import read_flags
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import flag
from agentrl.resolve.commands import TRAIN, load_config

OPENRLHF_SCRIPT = """
--pretrain M --load_checkpoint --save_path P --ckpt_path C --save_hf_ckpt --max_ckpt_num 3 --save_steps 10 --agent_func_path f.py
--prompt_data D --input_key prompt --label_key label --prompt_max_len 10240 --generate_max_len 64000 --apply_chat_template --packing_samples
--rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024 --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0
--use_dynamic_batch --train_max_tokens_per_gpu 16192 --rollout_max_tokens_per_gpu 32768 --micro_train_batch_size 1
--micro_rollout_batch_size 8 --max_samples 128000 --max_epochs 1 --num_episodes 1
--async_train --ref_num_nodes 1 --ref_num_gpus_per_node 4 --actor_num_nodes 1
--actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 --vllm_gpu_memory_utilization 0.7 --colocate_all_models
--deepspeed_enable_sleep --vllm_sync_backend nccl --enforce_eager --zero_stage 3 --gradient_checkpointing --adam_offload --ring_attn_size 2
--ring_head_stride 2 --param_dtype bf16 --advantage_estimator reinforce_baseline --actor_learning_rate 5e-7 --critic_learning_rate 9e-6
--entropy_loss_coef 0.0 --init_kl_coef 1e-5 --use_kl_loss --kl_estimator k2 --enable_vllm_is_correction --vllm_is_correction_type icepop
--use_tensorboard runs/x --logging_steps 1 --eval_steps -1
"""
"""The settings of OpenRLHF's train_reinforce_baseline_ray_agent_async.sh, those in comments included."""


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        load_config(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_fits_a_screen_and_names_the_main_settings_first(capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(capsys, "--help")
    assert page.count("\n") <= 60
    assert max(map(len, page.splitlines())) <= 80
    assert page.index("--agent") < page.index("--num-steps") < page.index("--help rollout")
    assert "`" not in page


def test_help_of_a_section_has_its_settings_only_and_all_has_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    section = shown(capsys, "--help", "rollout")
    assert "--max-turns" in section
    assert "--learning-rate" not in section
    whole = shown(capsys, "--help", "all")
    assert [name for name in settings_of(TrainConfig.schema({})) if f"  {flag(name)}" not in whole] == []
    assert "`" not in whole


def test_an_unknown_section_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="Sections: run, data"):
        load_config(["--help", "rolout"])


def test_every_flag_of_the_script_of_openrlhf_is_taken() -> None:
    config = read_flags(TRAIN, OPENRLHF_SCRIPT.split()).settings
    assert (config.flow.groups_per_step, config.sampling.n_samples_per_prompt, config.algo.mini_batches) == (128, 8, 1)
    assert (config.training.num_steps, config.training.eval_every, config.training.resume) == (1000, 0, "auto")
    assert (config.algo.off_policy, config.learner.sequence_parallel, config.learner.offload) == ("icepop", 2, ("optimizer",))
    assert (config.flow.flat_groups, config.flow.score_range, config.engine.engine_args) == ("resample", (0.0, 1.0), ("enforce_eager",))


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("--reward-funcs", "TRL; not here: name the file of the function with --agent FILE.py"),
        ("actor_rollout_ref.rollout.n=8", "verl; here: --n-samples-per-prompt"),
        ("--num-stps", "did you mean --num-steps?"),
        ("--zzz", "--help all"),
        ("--learner-parts", "was removed"),
    ],
)
def test_an_unknown_word_is_answered(word: str, answer: str) -> None:
    with pytest.raises(UnknownFlagError) as caught:
        load_config(["--agent", "m:X", word])
    assert answer in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_environment_may_stand_first() -> None:
    assert load_config(["package.module:Name", "--seed", "3"]).run.agent == "package.module:Name"


def test_the_tensorboard_flag_of_openrlhf_takes_a_directory_there() -> None:
    assert load_config(["m:X", "--use_tensorboard", "runs/x", "--seed", "4"]).run.seed == 4
