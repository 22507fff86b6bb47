"""Defaults < file < flags, and one clear message for whatever is wrong."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.load import aliases, expand_aliases
from agentrl.config.mapping import from_mapping, read_file, to_json
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.settings import flag
from agentrl.resolve.commands import load_config
from agentrl.rollout.plan import ModelConfig

AGENT = ["--agent", "package.module:Name"]


def refuse(*args: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config([*AGENT, *args])
    return caught.value


def test_flags_beat_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('num_steps = 7\nseed = 3\n[algo]\ngamma = 0.9\nadvantage_estimator = "reinforce"\n')
    config = load_config([*AGENT, "--config", str(file), "--seed", "5"])
    assert (config.training.num_steps, config.run.seed, config.algo.options["gamma"], config.sampling.n_samples_per_prompt) == (
        7,
        5,
        0.9,
        8,
    )


@pytest.mark.parametrize(
    ("name", "text"), [("c.yaml", "algo:\n  gamma: 1\nasync: true\n"), ("c.json", '{"async": true}'), ("c.toml", "async = true")]
)
def test_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load_config([*AGENT, f"--config={tmp_path / name}"]).flow.staleness == 1


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: learning_rat = 1.*Did you mean `learning_rate`"):
        from_mapping(TrainConfig, {"learner": {"learning_rat": 1}}, source="run.toml")


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        from_mapping(TrainConfig, {"algo": {"gamma": 1.0}, "gamma": 0.5})


def test_unknown_flag_names_the_nearest() -> None:
    assert "--num-step  did you mean --num-steps?" in str(refuse("--num-step", "3"))


@pytest.mark.parametrize(
    ("args", "field", "remedy"),
    [
        (["--groups-per-step", "0"], "--groups-per-step", "help"),
        (["--zero-stage", "4"], "--zero-stage", "help"),
        (["--n-samples-per-prompt", "1"], "--n-samples-per-prompt", "reinforce"),
        (["--async", "--max-staleness", "0"], "--max-staleness", "--async"),
        (["--async", "--off-policy", "none"], "--off-policy", "--allow-uncorrected"),
        (["--gamma", "0.9"], "--gamma", "use --advantage-estimator"),
        (["--top-p", "0.9"], "--top-p", "--top-p 1"),
        (["--temperature", "0"], "--temperature", "greater than or equal to 0.01.*help"),
        (["--temperature", "0.009"], "--temperature", "greater than or equal to 0.01.*help"),
        (["--temperature", "2.01"], "--temperature", "less than or equal to 2.*help"),
        (["--eval-every", "2", "--eval-temperature", "2.01"], "--eval-temperature", "less than or equal to 2.*help"),
        (["--model", "./no/such/dir"], "--model", "config.json|directory"),
        (["--runtime", "local", "--num-engines", "2"], "--num-engines", "ray"),
        (["--max-model-len", "64", "--max-new-tokens", "64"], "--max-new-tokens", "Lower"),
        (["--reward-clip-range", "1", "-1"], "--reward-clip-range", "Swap"),
        (["--prompts", "missing.jsonl"], "--prompts", "Looked"),
        (["--config", "missing.toml"], "--config", "path"),
    ],
)
def test_each_rule_names_flag_value_and_remedy(args: list[str], field: str, remedy: str) -> None:
    import re

    error = refuse(*args)
    assert error.field == field
    assert error.value is not None
    assert re.search(remedy, str(error))


def test_missing_agent() -> None:
    with pytest.raises(ConfigError, match="--agent"):
        load_config([])
    with pytest.raises(ConfigError, match="no such file"):
        load_config(["--agent", "missing.py:Env"])


def test_resolved_staleness_is_explicit() -> None:
    assert load_config([*AGENT]).flow.max_staleness == 0
    assert load_config([*AGENT, "--async"]).flow.max_staleness == 1
    both = load_config([*AGENT, "--max-staleness", "3"]).flow
    assert (both.max_staleness, both.asynchronous) == (3, True)


def test_aliases_keep_their_meaning_and_point_at_real_flags() -> None:
    known = {flag(name) for name in settings_of(TrainConfig.schema({}))}
    assert set(aliases(TrainConfig.schema({})).values()) <= known
    assert aliases(TrainConfig.schema({})) == {"--reward": "--remote-rm-url"}
    assert expand_aliases(["--seed", "--reward=x", "--run_dir"], aliases(TrainConfig)) == ["--seed", "--remote-rm-url=x", "--run-dir"]


def test_words_of_openrlhf_and_of_earlier_versions() -> None:
    config = load_config(["--agent_func_path", "m:X", "--eps_clip", "0.3", "--rollout-batch-size=4"])
    assert (config.algo.options["eps_clip_low"], config.algo.options["eps_clip_high"], config.flow.groups_per_step) == (0.3, 0.3, 4)
    config = load_config(["--agent", "m:X", "--beta", "0.04", "--dynamic-filtering", "--score-range=0.2 1"])
    assert (config.algo.init_kl_coef, config.algo.use_kl_loss, config.algo.kl_estimator) == (0.04, True, "k3")  # TRL's
    assert (config.flow.flat_groups, config.flow.score_range) == ("resample", (0.2, 1.0))
    assert load_config(["--agent", "m:X", "--dynamic_filtering"]).flow.score_range == (0.0, 1.0)  # OpenRLHF's
    assert load_config(["--agent", "m:X", "--no-dynamic-filtering"]).flow.flat_groups == "train"
    assert not load_config(["--agent", "m:X", "--beta", "0"]).algo.use_kl_loss


def test_every_field_has_a_docstring_and_a_unique_name(capsys: pytest.CaptureFixture[str]) -> None:
    form = TrainConfig.schema({})
    total = sum(len(dataclasses.fields(getattr(form(), s.name))) for s in dataclasses.fields(form))
    assert total == len(settings_of(form))
    assert all(item.doc for item in settings_of(form).values())
    with pytest.raises(SystemExit):
        load_config(["--help", "all"])
    text = capsys.readouterr().out
    assert "[0.0005]" in text
    assert all(flag(name) in text for name in settings_of(TrainConfig.schema({})))


def test_numbers_of_a_json_file_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"learning_rate": 1e-06, "agent": "\\ud83d\\ude00"}')
    assert read_file(tmp_path / "a.json") == {"learning_rate": 1e-6, "agent": "\U0001f600"}
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        read_file(tmp_path / "b.json")


def test_json_round_trip() -> None:
    config = load_config([*AGENT, "--async"])
    assert from_mapping(TrainConfig, json.loads(to_json(config))) == config


def test_a_run_that_was_saved_with_a_parser_of_tool_calls_keeps_it(tmp_path: Path) -> None:
    saved = json.loads(to_json(load_config([*AGENT, "--tool-parser", "json"])))
    assert saved["endpoint"]["tool_parser"] == "json"
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert load_config(["--config", str(tmp_path / "config.json")]).endpoint.tool_parser == "json"
    assert load_config(AGENT).endpoint.tool_parser == "auto"


def test_the_place_of_a_core_needs_vllm() -> None:
    assert "--engine-core = 'process': needs vLLM" in str(refuse("--engine", "transformers", "--engine-core", "process"))


def test_a_parser_of_vllm_by_name_needs_its_engine() -> None:
    assert "--tool-parser = 'hermes': needs vLLM" in str(refuse("--engine", "transformers", "--tool-parser", "hermes"))
    for name in ("auto", "json"):
        assert load_config([*AGENT, "--engine", "transformers", "--tool-parser", name]).endpoint.tool_parser == name


def test_config_error_pickles() -> None:
    error = ConfigError("--x", 1, "is bad", "Do y.")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.value) == (str(error), "--x", 1)


def test_a_wrong_flag_is_answered_within_a_second_without_heavy_imports() -> None:
    code = (
        "import sys\nfrom agentrl.resolve.commands import load_config\nfrom agentrl.core.errors import ConfigError\n"
        "try: load_config(['--agent', 'm:X', '--groups-per-step', '0'])\nexcept ConfigError: pass\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers') if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.stdout.strip() == "[]"
    assert min(seconds) < 2.0  # of processor time: about half of that on an idle machine, and more where others use the caches


def test_a_removed_setting_of_an_old_run_is_passed_over_unless_it_changed_the_training(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for parts, refused in ((1, False), (2, True)):
        path.write_text(json.dumps({"learner": {"learner_parts": parts, "num_learners": 2}}))
        assert from_mapping(TrainConfig, json.loads(path.read_text())).learner.num_learners == 2  # an old run can be looked at
        words = ["--config", str(path), "--agent", "m:X"]
        if refused:
            with pytest.raises(ConfigError, match=r"config.json: learner_parts = 2: was removed: .* Delete it there, or set it to 1"):
                load_config(words)
        else:
            assert load_config(words).learner.num_learners == 2


def test_the_name_of_a_bundled_model_is_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (Path(ModelConfig(model="tiny-vision").model) / "config.json").is_file()
    assert ModelConfig(model="someone/tiny-vision").model == "someone/tiny-vision"
    (tmp_path / "tiny-vision").mkdir()
    assert ModelConfig(model="tiny-vision").model == "tiny-vision"
