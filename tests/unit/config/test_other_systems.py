"""Words of other systems: their tables name settings that exist, know the words of those systems' own examples, and count as we do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.algo.plan import built_in_options
from agentrl.config.load import read_flags, read_given
from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.config.translate import System, answer, common, nearest, systems, translate
from agentrl.config.words import flags_of
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import flag
from agentrl.resolve import tune
from agentrl.resolve.commands import EVAL, TRAIN

WORDS = Path(__file__).with_name("words")
"""Names of the settings in the example scripts and programs of each system, one a line."""
TRAIN_FLAGS = {*flags_of(settings_of(TrainConfig.schema({}))), *map(flag, built_in_options()), "--dry-run", "--help"}
TUNE_FLAGS = {name for method in METHODS.values() for name in flags_of(settings_of(method.config))}


def words_of(name: str) -> list[str]:
    return (WORDS / f"{name}.txt").read_text().split()


def texts(meaning: Any) -> Iterator[str]:
    """Every text of an entry, by value or by another word."""
    if isinstance(meaning, str):
        yield meaning
    else:
        for key, part in meaning.items():
            if key != "of":
                yield from texts(part)


def taken(command: str, *words: str) -> Any:
    return read_flags(TRAIN if command == "train" else tune.command_of(command), words).settings


@pytest.mark.parametrize("system", systems().values(), ids=systems())
def test_flags_in_the_tables_exist(system: System) -> None:
    for table, flags in ((system.words, TRAIN_FLAGS), (system.tune, TUNE_FLAGS)):
        for word, meaning in table.items():
            for text in texts(meaning):
                named = {name.rstrip(",;:.") for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)}
                assert named <= (flags if text.startswith("--") else TRAIN_FLAGS | TUNE_FLAGS), (word, text)
                assert re.match(r"--|always\b|none\b", text), (word, text)
    of = [part["of"] for table in (system.words, system.tune) for part in table.values() if isinstance(part, dict) and "of" in part]
    assert all(system.knows(word) or system.knows(word, "sft") or word in TRAIN_FLAGS for word in of)
    assert all(system.knows(word, command) or word in TRAIN_FLAGS for command, usual in system.defaults.items() for word in usual)
    assert set(system.commands.values()) <= {"train", *METHODS}
    assert not {*system.renamed} & {*system.words}


def test_common_words_name_settings() -> None:
    assert {flag for flags in common().values() for flag in flags} <= TRAIN_FLAGS | TUNE_FLAGS


@pytest.mark.parametrize("name", systems())
def test_words_of_the_systems_own_examples_are_known(name: str) -> None:
    words, commands = words_of(name), ("train", *METHODS)
    known = [word for word in words if any(systems()[name].knows(word, command) for command in commands)]
    assert len(words) > 90
    assert len(known) >= 0.98 * len(words), sorted({*words} - {*known})


def test_settings_of_the_installed_trl_are_known() -> None:
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig

    kinds = {GRPOConfig: "train", SFTConfig: "sft", DPOConfig: "dpo", RewardConfig: "reward-model", KTOConfig: "kto"}
    for kind, command in kinds.items():
        own = TRAIN_FLAGS if command == "train" else flags_of(settings_of(METHODS[command].config))
        words = [flag(name) for name in kind.__dataclass_fields__]
        assert [word for word in words if not systems()["trl"].knows(word, command) and word not in own] == [], kind.__name__


def test_defaults_of_the_installed_trl_are_those_of_the_table() -> None:
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig

    kinds = {"train": GRPOConfig, "sft": SFTConfig, "dpo": DPOConfig, "reward-model": RewardConfig, "kto": KTOConfig}
    for command, usual in systems()["trl"].defaults.items():
        for word, value in usual.items():
            theirs = kinds[command].__dataclass_fields__[word[2:].replace("-", "_")].default
            assert str(theirs).lower() == value or float(theirs) == float(value), (command, word)


def test_defaults_of_the_installed_verl_are_those_of_the_table() -> None:
    import verl
    import yaml

    path = Path(verl.__path__[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for word, value in systems()["verl"].defaults["train"].items():
        part = config
        for key in word.split("."):
            part = part[key]
        assert str(part).lower().strip("[]").replace(" ", "") == value or float(part) == float(value), word


def of_each_kind() -> Iterator[tuple[str, str]]:
    for name in ("openrlhf", "trl"):
        for command in ("train", "sft", "dpo", "reward-model"):
            yield name, command


@pytest.mark.parametrize(("name", "command"), of_each_kind())
def test_no_word_of_theirs_is_answered_with_a_flag_that_only_looks_like_it(name: str, command: str) -> None:
    system = systems()[name]
    answers: dict[str, str] = {}
    for word in [each for each in words_of(name) if system.knows(each, command)]:
        for value in ((), ("1",), ("true",)):
            try:
                taken(command, word, *value)
            except UnknownFlagError as error:
                answers |= dict(error.answers)
            except ConfigError:
                pass  # a value that does not fit, or settings that are missing
    slips = {word: why for word, why in answers.items() if "did you mean" in why and word not in common()}
    assert slips == {}
    assert [word for word, why in answers.items() if "--help all" in why] == []


@pytest.mark.parametrize("name", ["verl", "prime_rl", "skyrl"])
def test_keys_of_the_others_are_answered_from_their_tables(name: str) -> None:
    for word in words_of(name):
        if "." in word and "-" not in word and systems()[name].knows(word):
            with pytest.raises(UnknownFlagError) as caught:
                taken("train", "--agent", "m:X", f"{word}=1")
            assert "here:" in dict(caught.value.answers)[word]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--learnin-rate", "did you mean --learning-rate?"),
        ("--samples", "did you mean --n-samples-per-prompt?"),
        ("--wandb", "did you mean --sink?"),
        ("--zzz", "--help all"),
        ("--vllm-quantum", "--help all"),
        ("--reward-temperature", "--help all"),
        ("--learner-parts", "was removed"),
        ("actor_rollout_ref.rollout.n=8", "verl; here: --n-samples-per-prompt 8"),
        ("trainer.placement.colocate_all=true", "SkyRL; here: --colocate"),
        ("--orchestrator.group_size", "prime-rl; here:"),
    ],
)
def test_an_unknown_word_is_answered_by_its_meaning_or_as_a_slip(word: str, meant: str) -> None:
    with pytest.raises(UnknownFlagError) as caught:
        taken("train", "--agent", "m:X", word)
    assert meant in str(caught.value)


def test_what_words_were_taken_for_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ring_attn_size", "2", "--ds_tensor_parallel_size", "2", "--use_icepop", "--colocate_critic_reward", "--enable_ema"]
    config = taken("train", "--agent", "m:X", *words, "--input_template", "Q: {}\nA:")
    assert (config.learner.sequence_parallel, config.learner.learner_tensor_parallel, config.learner.ema_decay) == (2, 2, 0.992)
    assert config.algo.off_policy == "icepop"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agentrl: words of OpenRLHF: --ring-attn-size 2 as --sequence-parallel 2, ")
    assert line.endswith("; nothing to write for --colocate-critic-reward")
    taken("train", "--agent", "m:X", "--actor.adam.lr", "1e-6", "--data.input_template", "Q: {}\nA:")
    assert len(capsys.readouterr().err.splitlines()) == 1
    taken("train", "--agent", "m:X", "--learning-rate", "1e-6")
    assert capsys.readouterr().err == ""


def test_words_without_a_meaning_are_refused_with_the_reason() -> None:
    with pytest.raises(UnknownFlagError) as caught:
        taken("train", "--agent", "m:X", "--use_ms", "--kl_horizon", "5", "--disable_fast_tokenizer", "--repetition_penalty", "1.1")
    answers = dict(caught.value.answers)
    assert set(answers) == {"--use-ms", "--kl-horizon", "--disable-fast-tokenizer", "--repetition-penalty"}
    assert answers["--use-ms"] == "OpenRLHF; not here: models are directories or names of Hugging Face"
    assert answers["--repetition-penalty"].startswith("TRL; not here: ")


def test_our_own_words_count_more_wherever_they_stand() -> None:
    config = taken("train", "--agent", "m:X", "--kl-estimator", "k2", "--beta=0.04")
    assert (config.algo.init_kl_coef, config.algo.use_kl_loss, config.algo.kl_estimator) == (0.04, True, "k2")
    for words in (["--epsilon", "0.1", "--epsilon-high", "0.3"], ["--epsilon_high=0.3", "--epsilon=0.1"]):
        options = taken("train", "--agent", "m:X", *words).algo.options
        assert (options["eps_clip_low"], options["eps_clip_high"]) == (0.1, 0.3)
    given = read_given(TRAIN, {"agent": "m:X", "num_generations": 4, "beta": 0.04, "kl_estimator": "k2"}, None).settings
    assert (given.sampling.n_samples_per_prompt, given.algo.kl_estimator) == (4, "k2")
    with pytest.raises(UnknownFlagError, match="models are directories"):
        read_given(TRAIN, {"agent": "m:X", "use_ms": True}, None)


def test_an_environment_behind_a_switch_is_no_value_of_it() -> None:
    for words in (
        ["--packing_samples", "env.py:Sums"],
        ["--vllm_enable_sleep", "package.module:Name"],
        ["--colocate_all_models", "env.py"],
    ):
        assert taken("train", *words).run.agent == words[1]


def test_a_switch_may_be_off() -> None:
    assert not taken("train", "--agent", "m:X", "--colocate_all_models", "false").weights.colocate
    assert taken("train", "--agent", "m:X", "--colocate_all_models", "True", "--packing_samples").weights.colocate
    assert taken("train", "--agent", "m:X", "--vllm_enable_sleep_mode=False", "--activation_offloading=false").learner.offload == ()


def test_a_critic_comes_with_the_estimator_that_has_one() -> None:
    system = systems()["openrlhf"]
    rate = {"--critic.adam.lr": ["9e-6"]}
    assert translate(system, rate, "train", {}).words == ["--advantage-estimator", "gae", "--critic-learning-rate", "9e-6"]
    with_gae = {"--algo.advantage.estimator": ["gae"], **rate}
    assert translate(system, with_gae, "train", {}).words == ["--advantage-estimator", "gae", "--critic-learning-rate", "9e-6"]
    others = {"--algo.advantage.estimator": ["rloo"], **rate}
    assert translate(system, others, "train", {}).words == ["--advantage-estimator", "rloo"]


COUNTED = """
openrlhf | train | | --rollout_batch_size=1024 --n_samples_per_prompt=1 --train_batch_size=128 | --groups-per-step 1024 --n-samples-per-prompt 1 --mini-batches 8
openrlhf | train | | --rollout_batch_size=128 --n_samples_per_prompt=8 --train_batch_size=1024 | --groups-per-step 128 --n-samples-per-prompt 8
openrlhf | train | | --train_batch_size=32 | --mini-batches 4
openrlhf | train | | --train_batch_size=100 --rollout_batch_size=30 --n_samples_per_prompt=8 | --groups-per-step 30 --n-samples-per-prompt 8 --mini-batches 3
openrlhf | train | | --rollout_batch_size=128 --max_samples=20000 --num_episodes=2 | --groups-per-step 128 --num-steps 313
openrlhf | train | 1000 | --rollout_batch_size=128 --max_samples=20000 --num_episodes=2 | --groups-per-step 128 --num-steps 16
openrlhf | train | | --max_samples=100000000 --num_episodes=1 |
openrlhf | train | 640 | --num_episodes=1 --lr_warmup_ratio=0.1 | --num-steps 40 --lr-warmup-steps 4
openrlhf | train | | --lr_warmup_ratio=0.03 | --lr-warmup-steps 2
openrlhf | train | | --actor.num_nodes=2 --actor.num_gpus_per_node=8 | --num-learners 16
trl | train | | --per_device_train_batch_size=8 --gradient_accumulation_steps=4 --num_generations=8 | --n-samples-per-prompt 8 --groups-per-step 4
trl | train | | --per_device_train_batch_size=8 --num_processes=4 --num_generations=4 | --n-samples-per-prompt 4 --groups-per-step 8 --num-learners 4
trl | train | | --per_device_train_batch_size=8 --steps_per_generation=4 --num_generations=8 --max_steps=100 | --n-samples-per-prompt 8 --groups-per-step 4 --mini-batches 4 --num-steps 25
trl | train | | --per_device_train_batch_size=8 --generation_batch_size=64 --num_generations=8 | --n-samples-per-prompt 8 --mini-batches 8 --groups-per-step 8
verl | train | | data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 | --groups-per-step 1024 --n-samples-per-prompt 5 --mini-batches 4
verl | train | | trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.tensor_model_parallel_size=4 | --num-learners 16 --tensor-parallel-size 4 --num-engines 4
skyrl | train | | trainer.train_batch_size=64 trainer.policy_mini_batch_size=16 generator.n_samples_per_prompt=8 | --groups-per-step 64 --n-samples-per-prompt 8 --mini-batches 4
prime_rl | train | | orchestrator.batch_size=512 orchestrator.group_size=16 | --n-samples-per-prompt 16 --groups-per-step 32
openrlhf | sft | 1000 | --train_batch_size=256 --max_epochs=2 --lr_warmup_ratio=0.25 | --num-epochs 2 --batch-size 256 --lr-warmup-steps 2
trl | sft | 1000 | --per_device_train_batch_size=4 --gradient_accumulation_steps=8 --num_processes=2 --num_train_epochs=3 | --batch-size 64 --num-epochs 3 --num-ranks 2
"""  # noqa: E501
"""System, command, rows of the data where they are known, words, and what they are here.

A step of ours has 16 groups of 8 answers where nothing is written, and 50 steps are a run.
"""


@pytest.mark.parametrize("line", COUNTED.strip().splitlines())
def test_numbers_that_are_counted_otherwise(line: str) -> None:
    name, command, rows, words, expected = map(str.strip, line.split("|"))
    given = {word: [value] for word, _, value in (each.partition("=") for each in words.split())}
    made = translate(systems()[name], given, command, {}, rows=lambda _: int(rows) if rows else None)
    assert sorted(re.findall(r"--\S+ \S+", " ".join(made.words))) == sorted(re.findall(r"--\S+ \S+", expected))
    assert made.refused == []


def test_a_reward_model_judges_answers_unless_an_environment_does() -> None:
    for words, agent in (([], "answer:"), (["env.py"], "env.py"), (["--agent", "m:X"], "m:X"), (["--agent_func_path", "f.py"], "f.py")):
        config = taken("train", *words, "--reward_pretrain", "judge", "--packing_samples")
        assert (config.run.agent, config.reward.reward_model) == (agent, ("judge",))
        config = taken("train", "--reward_pretrain", "judge", *words)
        assert (config.run.agent, config.reward.reward_model) == (agent, ("judge",))


def test_a_number_that_is_none_is_refused() -> None:
    assert translate(systems()["openrlhf"], {"--train_batch_size": ["$SIZE"]}, "train", {}).refused == [
        ("--train_batch_size $SIZE", "it is not a number")
    ]


def test_our_numbers_count_beside_theirs() -> None:
    assert translate(systems()["openrlhf"], {"--train_batch_size": ["32"]}, "train", {"--groups-per-step": ["4"]}).words == []


def test_rows_that_would_be_left_out_are_refused_in_training_on_given_rows() -> None:
    system = systems()["openrlhf"]
    assert translate(system, {"--max_samples": ["10"]}, "sft", {}, rows=lambda _: 11).refused[0][0] == "--max_samples 10"
    assert translate(system, {"--max_samples": ["10"]}, "sft", {}, rows=lambda _: 10).refused == []
    assert translate(system, {"--lr_warmup_ratio": ["0.1"]}, "sft", {}).refused[0][1].endswith("write --lr-warmup-steps N")


def test_a_word_of_training_is_no_word_of_another_system_elsewhere() -> None:
    with pytest.raises(UnknownFlagError, match="--gamma  a setting of agentrl train"):
        read_flags(EVAL, ["--agent", "m:X", "--gamma", "0.9"])
    assert read_flags(EVAL, ["--agent", "m:X", "--pretrain", "m"]).settings.model.model == "m"


def test_the_system_of_a_command_line_is_the_one_that_names_its_words() -> None:
    assert nearest(["--learning_rate", "--num_generations"], "train")[0].name == "TRL"
    assert nearest(["model.name", "data.seq_len", "optim.lr"], "train", "sft")[0].name == "prime-rl"
    assert nearest(["data.train_files", "model.path"], "train", "sft")[0].name == "verl"
    assert nearest(["no.such.key"], "train") == []
    assert answer("no.such.key", "1", "train") == ""
