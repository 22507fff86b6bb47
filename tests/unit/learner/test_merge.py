"""Merged adapters and averages, against peft's own merge and written-out sums."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from agentrl.assets import tiny_model_path
from agentrl.cli.merge import main
from agentrl.core.errors import CheckpointError, ConfigError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.tensor([[5, 9, 3, 7]])


def base(folder: Path, kind: type = AutoModelForCausalLM, seed: int = 1) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=512, num_labels=1, pad_token_id=0, tie_word_embeddings=kind is AutoModelForCausalLM, **SIZES)
    kind.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(tiny_model_path())).save_pretrained(folder)
    return folder


def adapter(folder: Path, of: Path, kind: type = AutoModelForCausalLM, task: TaskType = TaskType.CAUSAL_LM, **form: bool) -> Path:
    """An adapter with random weights; that of a classifier has the head too."""
    torch.manual_seed(7)
    head = ["score"] if task is TaskType.SEQ_CLS else None
    settings = LoraConfig(task_type=task, r=4, target_modules="all-linear", modules_to_save=head, **form)
    model = get_peft_model(kind.from_pretrained(of), settings)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["", "use_dora", "use_rslora"])
@pytest.mark.parametrize(
    ("kind", "task"), [(AutoModelForCausalLM, TaskType.CAUSAL_LM), (AutoModelForSequenceClassification, TaskType.SEQ_CLS)]
)
def test_a_merged_model_computes_what_peft_computes_with_the_adapter(tmp_path: Path, kind: type, task: TaskType, form: str) -> None:
    model = base(tmp_path / "base", kind)
    saved = adapter(tmp_path / "adapter", model, kind, task, **({form: True} if form else {}))
    assert main([str(saved), "--output", str(tmp_path / "out")]) == 0
    with torch.no_grad():
        expected = PeftModel.from_pretrained(kind.from_pretrained(model), saved)(IDS).logits
        plain, found = kind.from_pretrained(model)(IDS).logits, kind.from_pretrained(tmp_path / "out")(IDS).logits
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-2)
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == sorted(load_file(model / "model.safetensors"))
    assert (tmp_path / "out" / "chat_template.jinja").is_file()


def test_an_average_is_the_weighted_sum_of_every_tensor(tmp_path: Path) -> None:
    models = [base(tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    assert main([*map(str, models), "--weights", "3", "1", "--output", str(tmp_path / "out")]) == 0
    first, second, found = (load_file(path / "model.safetensors") for path in (*models, tmp_path / "out"))
    for name, tensor in found.items():
        assert torch.allclose(tensor, 0.75 * first[name] + 0.25 * second[name], atol=1e-7)
        assert not torch.equal(first[name], second[name]) or "norm" in name
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    AutoTokenizer.from_pretrained(tmp_path / "out")


def test_models_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first, other = base(tmp_path / "a"), base(tmp_path / "b")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(8)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.norm.weight is \[8\] here and \[16\] there"):
        main([str(first), str(other), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
    saved = adapter(tmp_path / "adapter", first)
    (saved / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be put on"):
        main([str(saved), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_requests_that_cannot_be_carried_out_say_why(tmp_path: Path) -> None:
    model = base(tmp_path / "a")
    saved, out = adapter(tmp_path / "adapter", model), ["--output", str(tmp_path / "out")]
    for words, problem in (
        ([str(model), *out], "nothing to average it with"),
        ([str(model), str(saved), *out], "Merge it first"),
        ([str(model), str(model), "--weights", "1", *out], "must be 2 numbers"),
        ([str(model), str(model), "--base", "x", *out], "no effect on an average"),
        ([str(saved)], "--output"),
        ([str(saved), "--output", str(model)], "exists"),
    ):
        with pytest.raises(ConfigError, match=problem):
            main(words)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"peft_type": "IA3"}, "holds an adapter of the kind IA3"),
        ({"base_model_name_or_path": None}, "is not given, and the adapter does not say"),
    ],
)
def test_adapters_that_cannot_be_merged_say_why(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    saved = adapter(tmp_path / "adapter", base(tmp_path / "base"))
    file = saved / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=problem):
        main([str(saved), "--output", str(tmp_path / "out")])
