"""The short certification before a run, the certificates that are kept, and the command."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.api.settings import read_settings
from agentrl.api.training import train
from agentrl.assets import tiny_model_path
from agentrl.certify import before
from agentrl.certify.before import certificate_file, is_known, keep_certificate, kernels_of, read_certificate, refuse_wrong
from agentrl.certify.results import Certificate, Comparison, Verdict
from agentrl.cli.main import main
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed
from agentrl.core.errors import ConfigError
from agentrl.core.paths import CACHE
from agentrl.learner.plan import LearnerConfig
from agentrl.learner.settings import LearnerSettings
from agentrl.resolve.parts import learner_plan
from agentrl.resolve.plan import RunPlan

SETTINGS = {"model_type": "gemma2", "hidden_size": 8}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def certificate(*wrong: str) -> Certificate:
    exact = Comparison(part="learner", name="eager, padded", verdict=Verdict.EXACT, logprob=1e-6, gradient=1e-6)
    bad = [
        Comparison(part="learner", name=name, verdict=Verdict.WRONG, logprob=0.5, gradient=0.1, reason="they differ", remedy="Use another.")
        for name in wrong
    ]
    return Certificate(model="M", model_type="gemma2", layers=2, parameters=10, comparisons=(exact, *bad), seconds=1.0)


def model(folder: Path, settings: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"model_type": "llama", "attention_dropout": 0.1}, True),
        ({"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        ({"model_type": "qwen2", "rope_scaling": {"type": "dynamic", "factor": 4.0}}, False),
        ({"model_type": "llama", "residual_dropout": 0.1}, False),
        ({"model_type": "gemma2"}, False),
        ({"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2"}}, False),
    ],
)
def test_only_plain_models_are_not_tried(settings: dict[str, Any], known: bool) -> None:
    assert is_known(settings) is known


def test_the_bundled_model_is_not_tried() -> None:
    assert is_known(json.loads((tiny_model_path() / "config.json").read_text()))


def test_the_kernel_of_the_run_is_tried() -> None:
    assert kernels_of(LearnerConfig(), "cpu") == ("sdpa",)
    assert kernels_of(LearnerConfig(), "cuda") == ("varlen", "sdpa")
    assert kernels_of(LearnerConfig(attn_implementation="eager"), "cuda") == ("eager",)


def test_certificates_are_kept_by_configuration_and_parts(tmp_path: Path) -> None:
    path = certificate_file(SETTINGS, ("sdpa",))
    assert read_certificate(path) is None
    keep_certificate(path, certificate("sdpa, padded"))
    assert read_certificate(certificate_file(SETTINGS | {"_name_or_path": "elsewhere"}, ("sdpa",))) == certificate("sdpa, padded")
    assert certificate_file(SETTINGS | {"hidden_size": 9}, ("sdpa",)) != path
    assert certificate_file(SETTINGS, ("eager",)) != path
    path.write_text("{")
    assert read_certificate(path) is None


def learner(config: TrainConfig, name: str) -> LearnerSettings:
    return learner_plan(changed(config, model=name), "cpu")


def test_a_model_known_to_be_wrong_is_refused_at_once_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "_certify", None)  # nothing is tried
    name = model(tmp_path, SETTINGS)
    keep_certificate(certificate_file(SETTINGS, ("sdpa",)), certificate("sdpa, padded"))
    with pytest.raises(
        ConfigError, match=r"sdpa, padded wrong for models of the type gemma2.*0\.5 nats.* Use another\. --skip-checks model"
    ):
        asyncio.run(refuse_wrong(learner(TrainConfig(), name)))


def test_a_layout_that_the_run_does_not_use_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before, "_certify", None)
    keep_certificate(certificate_file(SETTINGS, ("sdpa",)), certificate("sdpa, prefix trees"))
    asyncio.run(refuse_wrong(learner(changed(TrainConfig(), share_prompts=False), model(tmp_path, SETTINGS))))


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_another_type_is_tried_in_a_process_of_its_own_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model_type": "olmo2", "num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 32}
    name = model(tmp_path, settings)
    monkeypatch.setattr(before, "DEADLINE_S", 250.0)
    asyncio.run(refuse_wrong(learner(TrainConfig(), name)))
    kept = read_certificate(certificate_file(settings, ("sdpa",)))
    assert kept is not None
    assert kept.verdict is Verdict.EXACT
    monkeypatch.setattr(before, "_certify", None)
    asyncio.run(refuse_wrong(learner(TrainConfig(), name)))


def test_a_model_that_cannot_be_tried_passes(tmp_path: Path) -> None:
    asyncio.run(refuse_wrong(learner(TrainConfig(), model(tmp_path, {"model_type": "no_such_model"}))))


@pytest.mark.parametrize(("wrong", "code"), [((), 0), (("sdpa, padded",), 1)])
def test_the_command_prints_a_table_or_json(
    wrong: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentrl.certify.run.certify", lambda *_, **__: certificate(*wrong))
    name = model(tmp_path, {"model_type": "gemma2"})
    assert main(["certify", name]) == code
    shown = capsys.readouterr().out
    assert "eager, padded" in shown
    assert ("sdpa, padded: Use another." in shown) is bool(wrong)
    assert main(["certify", name, "--json"]) == code
    written = Certificate.from_dict(json.loads(capsys.readouterr().out))
    assert [row.verdict for row in written.comparisons if row.part == "template"] == [Verdict.UNTRIED]  # the folder has no tokenizer
    assert replace(written, comparisons=tuple(row for row in written.comparisons if row.part != "template")) == certificate(*wrong)


def test_nothing_that_can_be_tried_has_a_code_of_its_own() -> None:
    untried = Comparison(part="learner", name="sdpa", verdict=Verdict.UNTRIED, reason="no")
    assert Certificate(model="M", model_type="m", layers=2, parameters=1, comparisons=(untried,), seconds=0.0).exit_code == 2


def test_a_model_of_another_kind_ends_with_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", model(tmp_path, {"model_type": "vit"})]) == 2
    assert "vit" in capsys.readouterr().err


@pytest.mark.parametrize("head_start", [5.0, 0.0])
def test_a_run_prepares_while_its_model_is_tried_and_ends_what_it_started_if_that_is_refused(
    head_start: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    started = asyncio.Event()

    async def refuse(*_: object) -> None:
        seen.append("begun")
        if head_start == 0:
            await started.wait()
        raise ConfigError("--attn-implementation", "auto", "is wrong", "Use another.")

    async def start(_: object) -> None:
        seen.append("started")
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    monkeypatch.setattr("agentrl.api.training.PROOF_S", head_start)
    monkeypatch.setattr("agentrl.api.training.refuse_wrong", refuse)
    monkeypatch.setattr("agentrl.api.training.check_all_prompts", lambda *_: seen.append("prompts"))
    monkeypatch.setattr("agentrl.cluster.runtime.LocalRuntime.start", start)
    settings = {"run_dir": tmp_path / "run", "engine": "transformers", "runtime": "local"}
    plan = RunPlan.of(read_settings("envs/calculator.py", settings))
    with pytest.raises(ConfigError, match="is wrong"):
        asyncio.run(train(plan))
    assert seen == ["begun", "prompts", *(("started", "ended") if head_start == 0 else ())]
