"""Losses and metrics of each method on a tiny random model: their formulas, and the same however rows are spread over ranks."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification, TrainingArguments

from agentrl.algo.objectives.distill import generalized_jsd
from agentrl.learner.models import disable_dropout
from agentrl.tune import objectives
from agentrl.tune.objectives import OBJECTIVES, Measured, count_losses
from agentrl.tune.row_table import Row
from agentrl.tune.row_text import IGNORED
from agentrl.tune.trainer import Collator, MethodTrainer

VOCABULARY, ROWS, PAD = 32, 4, 0
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.3, pad_token_id=PAD, **SHAPE)
KINDS = {"reward-model": (LlamaForSequenceClassification, {"num_labels": 1}), "process-reward-model": (LlamaForTokenClassification, {})}
OWN: dict[str, dict[str, Any]] = {
    "sft": {"loss": "nll"},
    "distill": {"beta": 0.3, "temperature": 1.5},
    "dpo": {"loss": "sigmoid", "beta": 0.5, "label_smoothing": 0.0},
    "orpo": {"beta": 0.25},
    "kto": {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "reward-model": {"center_rewards_coefficient": 0.1},
    "process-reward-model": {},
}
SPREAD = ("sft", "distill", "dpo", "reward-model", "process-reward-model")
"""Methods of which each row or token has a loss of its own; ORPO's likelihood and KTO's divergence are those of a micro-batch."""


def model(command: str = "dpo", seed: int = 0) -> Any:
    kind, more = KINDS.get(command, (LlamaForCausalLM, {}))
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIG)
    for name, value in more.items():
        setattr(config, name, value)
    made = kind(config)
    disable_dropout(made)
    return made


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(command: str, *, same_length: bool = False) -> list[Row]:
    """Rows whose answers differ in length."""
    found: list[Row] = []
    for number in range(ROWS):
        prompt, first, second = (
            tokens(2 + number % 3, number),
            tokens(4 if same_length else 2 + number, 10 + number),
            tokens(4, 20 + number),
        )
        if command in ("sft", "distill"):
            found.append({"input_ids": prompt + first, "labels": [IGNORED] * len(prompt) + first})
        elif command == "process-reward-model":
            labels = [IGNORED] * len(prompt) + [float((number + place) % 2) for place in range(len(first))]
            found.append({"input_ids": prompt + first, "labels": labels})
        elif command == "kto":
            found.append({"prompt_ids": prompt, "completion_ids": first, "label": number % 2 == 0})
        else:
            found.append({"prompt_ids": prompt, "chosen_ids": first, "rejected_ids": second, "margin": 0.1 * number})
    return found


def objective(command: str, frozen: Any = None) -> Any:
    return functools.partial(OBJECTIVES[command], SimpleNamespace(**OWN[command]), model(seed=7) if frozen is None else frozen)


def measured(command: str, chosen: list[Row], trained: Any = None) -> Measured:
    found: Measured = objective(command)(model(command) if trained is None else trained, Collator(PAD)(chosen))
    return found


def logprobs(of: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Log-probability of each token of an answer, by a forward pass of the row alone. # [n]."""
    with torch.no_grad():
        found = torch.log_softmax(of(input_ids=torch.tensor([prompt + answer])).logits[0], -1)
    return torch.stack([found[len(prompt) - 1 + place, token] for place, token in enumerate(answer)])


def log_ratio(row: Row, key: str) -> float:
    return float(logprobs(model(), row["prompt_ids"], row[key]).sum() - logprobs(model(seed=7), row["prompt_ids"], row[key]).sum())


def minus_log_sigmoid(value: float) -> float:
    return math.log1p(math.exp(-value))


def test_preference_is_that_of_the_log_ratios() -> None:
    pairs = rows("dpo")
    found = measured("dpo", pairs)
    chosen, rejected = ([log_ratio(row, key) for row in pairs] for key in ("chosen_ids", "rejected_ids"))
    assert found.losses.tolist() == pytest.approx(
        [minus_log_sigmoid(0.5 * (a - b)) for a, b in zip(chosen, rejected, strict=True)], abs=1e-5
    )
    assert found.metrics["reward/chosen"].tolist() == pytest.approx([0.5 * a for a in chosen], abs=1e-5)
    assert found.metrics["reward/rejected"].tolist() == pytest.approx([0.5 * b for b in rejected], abs=1e-5)
    assert found.metrics["accuracy"].tolist() == [a > b for a, b in zip(chosen, rejected, strict=True)]
    sums = [float(logprobs(model(), row["prompt_ids"], row["rejected_ids"]).sum()) for row in pairs]
    assert found.metrics["logprob/rejected"].tolist() == pytest.approx(sums, abs=1e-5)


def test_labelled_answers_are_held_against_those_of_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence is the mean over ranks; here the other rank has one that is larger by 1."""
    asked: list[tuple[float, str]] = []

    def reduce(value: Tensor, how: str) -> Tensor:
        asked.append((float(value), how))
        return value + 0.5

    monkeypatch.setattr(objectives, "reduce", reduce)
    answers = rows("kto")
    found = measured("kto", answers)
    others = [{**row, "completion_ids": answers[place - 1]["completion_ids"]} for place, row in enumerate(answers)]
    own = sum(log_ratio(row, "completion_ids") for row in others) / ROWS
    assert asked == [(pytest.approx(own, abs=1e-5), "mean")]
    z = max(own + 0.5, 0.0)
    ratios = [log_ratio(row, "completion_ids") for row in answers]
    expected = [
        (1.5 if row["label"] else 0.5) * (1 - 1 / (1 + math.exp(-0.5 * (ratio - z) * (1 if row["label"] else -1))))
        for row, ratio in zip(answers, ratios, strict=True)
    ]
    assert found.losses.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.metrics["kl"].tolist() == pytest.approx([z], abs=1e-5)
    assert found.metrics["reward/chosen"].tolist() == pytest.approx([0.5 * ratios[0], 0.5 * ratios[2]], abs=1e-5)
    assert found.metrics["reward/rejected"].tolist() == pytest.approx([0.5 * ratios[1], 0.5 * ratios[3]], abs=1e-5)
    assert not found.losses.isnan().any()


def test_a_negative_divergence_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "reduce", lambda value, how: torch.full_like(value, -3.0))
    assert measured("kto", rows("kto")).metrics["kl"].tolist() == [0.0]


def test_odds_ratio_and_likelihood_are_of_means_over_tokens() -> None:
    pairs = rows("orpo")
    found = measured("orpo", pairs)
    chosen, rejected = ([logprobs(model(), row["prompt_ids"], row[key]) for row in pairs] for key in ("chosen_ids", "rejected_ids"))
    likelihood = -sum(float(each.sum()) for each in chosen) / sum(map(len, chosen))
    shares = [-float(each.sum()) * len(chosen) / sum(map(len, chosen)) for each in chosen]
    ratios = []
    for share, good, bad in zip(shares, chosen, rejected, strict=True):
        p, q = math.exp(float(good.mean())), math.exp(float(bad.mean()))
        ratios.append(share + 0.25 * minus_log_sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q))))
    assert found.losses.tolist() == pytest.approx(ratios, abs=1e-5)
    assert found.metrics["nll"].mean().item() == pytest.approx(likelihood, abs=1e-5)
    assert found.metrics["nll"].tolist() == pytest.approx(shares, abs=1e-5)
    assert found.metrics["reward/rejected"].tolist() == pytest.approx([0.25 * float(each.mean()) for each in rejected], abs=1e-5)


def test_supervised_losses_are_of_labelled_tokens_and_dft_weighs_them_by_their_probability() -> None:
    chats = rows("sft")
    prompts = [row["labels"].count(IGNORED) for row in chats]
    expected = torch.cat([logprobs(model(), row["input_ids"][:n], row["input_ids"][n:]) for row, n in zip(chats, prompts, strict=True)])
    torch.testing.assert_close(measured("sft", chats).losses, -expected, atol=1e-5, rtol=0)
    trained = model()
    weighted = OBJECTIVES["sft"](SimpleNamespace(loss="dft"), None, trained, Collator(PAD)(chats)).losses
    torch.testing.assert_close(weighted, -expected * expected.exp(), atol=1e-5, rtol=0)
    weighted.sum().backward()
    slope = trained.lm_head.weight.grad.clone()
    trained.zero_grad()
    (OBJECTIVES["sft"](SimpleNamespace(loss="nll"), None, trained, Collator(PAD)(chats)).losses * expected.exp()).sum().backward()
    torch.testing.assert_close(slope, trained.lm_head.weight.grad, atol=1e-5, rtol=0)  # the weight has no gradient


def test_distillation_reports_the_forward_divergence_and_agreement() -> None:
    chats = rows("distill")
    found = measured("distill", chats)
    batch = Collator(PAD)(chats)
    mask = batch["labels"][:, 1:] != IGNORED
    with torch.no_grad():
        student, teacher = (
            each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1][mask]
            for each in (model(), model(seed=7))
        )
    p, q = teacher.softmax(-1), student.softmax(-1)
    torch.testing.assert_close(found.metrics["kl"], (p * (p / q).log()).sum(-1), atol=1e-5, rtol=0)
    assert torch.equal(found.metrics["agreement"], student.argmax(-1) == teacher.argmax(-1))
    torch.testing.assert_close(found.losses, generalized_jsd(student, teacher, beta=0.3, temperature=1.5), atol=1e-5, rtol=0)
    assert found.losses.requires_grad
    assert not found.metrics["kl"].requires_grad


def test_a_step_is_judged_right_on_the_side_of_its_label() -> None:
    answers = rows("process-reward-model")
    found = measured("process-reward-model", answers)
    labels = torch.tensor([label for row in answers for label in row["labels"] if label != IGNORED])
    with torch.no_grad():
        every = [model("process-reward-model")(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in answers]
    places = [[place for place, label in enumerate(row["labels"]) if label != IGNORED] for row in answers]
    logits = torch.cat([of_row[chosen] for of_row, chosen in zip(every, places, strict=True)])
    assert torch.equal(found.metrics["accuracy"], (logits[:, 1] > logits[:, 0]) == (labels > 0.5))
    assert torch.equal(found.metrics["label/mean"], labels)


def test_a_reward_model_reports_the_mean_reward_of_all_answers() -> None:
    found = measured("reward-model", rows("reward-model"))
    margin = found.metrics["margin"]
    assert found.metrics["reward/mean"].shape == (2 * ROWS,)
    assert torch.equal(found.metrics["accuracy"], margin > 0)
    chosen, rejected = found.metrics["reward/mean"].chunk(2)
    plain = -torch.nn.functional.logsigmoid(margin - 0.1 * torch.arange(ROWS)) + 0.1 * (chosen + rejected) ** 2
    torch.testing.assert_close(found.losses, plain)


def test_the_reference_has_no_gradient_and_is_the_model_without_its_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    trained = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    batch = Collator(PAD)(rows("dpo"))
    own = objectives.score(trained, batch).row_sums()
    reference = objectives.reference_sums(None, trained, batch)
    assert not reference.requires_grad
    assert not objectives.reference_sums(model(seed=7), trained, batch).requires_grad
    torch.testing.assert_close(reference, objectives.score(model(), batch).row_sums().detach())
    assert not torch.allclose(own, reference)
    torch.testing.assert_close(objectives.score(trained, batch).row_sums(), own)  # the adapter is on again


# However rows are spread


def share(command: str, chosen: list[Row], total: int, *, ranks: int, accumulation: int = 1) -> tuple[float, dict[str, Any]]:
    """Loss of a micro-batch as the trainer gives it to the backward pass on one of the ranks, and the sums of its metrics."""
    trained = model(command)
    accelerator = SimpleNamespace(num_processes=ranks, reduce=lambda values: values)
    arguments = SimpleNamespace(gradient_accumulation_steps=accumulation)
    trainer: Any = SimpleNamespace(model=trained, _in_training=True, _objective=objective(command), accelerator=accelerator, args=arguments)
    trainer._sums = {True: {}, False: {}}
    trainer._add = functools.partial(MethodTrainer._add, trainer)
    trained.train()
    loss = MethodTrainer.compute_loss(trainer, trained, Collator(PAD)(chosen), num_items_in_batch=torch.tensor(total))
    return loss.item(), trainer._sums[True]


@pytest.mark.parametrize("command", SPREAD)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_two_ranks_have_the_loss_of_one(command: str, first: int) -> None:
    every = rows(command)
    total = count_losses(Collator(PAD)(every))
    alone, sums = share(command, every, total, ranks=1)
    assert alone == pytest.approx(measured(command, every).losses.mean().item(), abs=1e-6)
    parts = [share(command, part, total, ranks=2) for part in (every[:first], every[first:])]
    assert sum(loss for loss, _ in parts) / 2 == pytest.approx(alone, abs=1e-5)  # gradients are averaged over ranks
    for name, pair in sums.items():
        assert (parts[0][1][name] + parts[1][1][name]).tolist() == pytest.approx(pair.tolist(), abs=1e-4), name


def test_ranks_share_the_odds_ratio_of_answers_of_one_length() -> None:
    every = rows("orpo", same_length=True)
    parts = [share("orpo", part, ROWS, ranks=2)[0] for part in (every[:1], every[1:])]
    assert sum(parts) / 2 == pytest.approx(share("orpo", every, ROWS, ranks=1)[0], abs=1e-5)


def test_ranks_share_the_loss_of_labelled_answers_at_one_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "reduce", lambda value, how: torch.full_like(value, 0.7))
    every = rows("kto")
    parts = [share("kto", part, ROWS, ranks=2)[0] for part in (every[:2], every[2:])]
    assert sum(parts) / 2 == pytest.approx(share("kto", every, ROWS, ranks=1)[0], abs=1e-5)


def test_the_balance_of_experts_counts_once_in_a_step() -> None:
    balanced = Measured(torch.tensor([2.0, 4.0]), {"m": torch.ones(2)}, torch.tensor(0.8))
    trainer: Any = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _in_training=True,
        _objective=lambda model, inputs: balanced,
        _add=lambda metrics: None,
        accelerator=SimpleNamespace(num_processes=2),
        args=SimpleNamespace(gradient_accumulation_steps=4),
    )
    loss = functools.partial(MethodTrainer.compute_loss, trainer, None, None)
    assert float(loss(num_items_in_batch=torch.tensor(24))) == pytest.approx(6.0 * 2 / 24 + 0.8 / 4)
    assert float(loss()) == pytest.approx(3.0 + 0.8)


def test_experts_are_balanced_in_training_only() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "router_aux_loss_coef": 0.5,
    }
    trained = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, pad_token_id=PAD, **SHAPE, **experts))
    batch = Collator(PAD)(rows("sft"))
    found = OBJECTIVES["sft"](SimpleNamespace(loss="nll"), None, trained, batch).balance
    whole = trained(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_router_logits=True).aux_loss
    assert found is not None
    assert float(found) == pytest.approx(0.5 * float(whole), rel=1e-5)
    with torch.no_grad():
        assert OBJECTIVES["sft"](SimpleNamespace(loss="nll"), None, trained, batch).balance is None


def trained_weights(command: str, folder: Path, micro: int) -> dict[str, Tensor]:
    """Weights after one step of plain gradient descent in micro-batches of so many rows."""
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=ROWS // micro,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    every = rows(command, same_length=command == "orpo")
    trainer = MethodTrainer(objective=objective(command), model=model(command), args=args, train_dataset=every, data_collator=Collator(PAD))
    trainer.train()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


@pytest.mark.parametrize("command", [*SPREAD, "orpo"])
def test_micro_batches_give_the_step_of_the_whole(command: str, tmp_path: Path) -> None:
    whole, parts = (trained_weights(command, tmp_path, micro) for micro in (ROWS, 1 if command != "orpo" else 2))
    before = dict(model(command).named_parameters())
    assert max(float((whole[name] - before[name]).detach().abs().max()) for name in whole) > 1e-2
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-5, rtol=1e-4)


def evaluated(command: str, folder: Path) -> tuple[dict[str, Any], Measured]:
    """What an evaluation in micro-batches of 3 rows and 1 logs, and the losses and metrics of all rows at once."""
    args = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=3, use_cpu=True, remove_unused_columns=False, report_to=[], disable_tqdm=True
    )
    every = rows(command)
    trainer = MethodTrainer(objective=objective(command), model=model(command), args=args, eval_dataset=every, data_collator=Collator(PAD))
    trainer.evaluate()
    return trainer.state.log_history[-1], measured(command, every)


@pytest.mark.parametrize("command", ["dpo", "sft"])
def test_the_loss_of_an_evaluation_is_the_mean_over_its_rows_or_tokens(command: str, tmp_path: Path) -> None:
    logged, expected = evaluated(command, tmp_path)
    assert logged["eval_loss"] == pytest.approx(expected.losses.mean().item(), abs=1e-5)


def test_the_margin_is_the_difference_of_the_mean_rewards(tmp_path: Path) -> None:
    logged, expected = evaluated("dpo", tmp_path)
    chosen, rejected = (expected.metrics[f"reward/{name}"].mean().item() for name in ("chosen", "rejected"))
    assert logged["eval_margin"] == pytest.approx(chosen - rejected, abs=1e-5)
    assert not any(name.startswith("reward") for name in logged)
