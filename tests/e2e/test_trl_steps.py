"""Forty steps of supervised and preference training have the losses of TRL's trainers, to five decimals, on ragged rows in float32.

A loss above 3, as IPO's squares are, may differ by 3e-6 of itself, which is 25 units of its last place.

Both get the same tokens in the same order, the same model, AdamW, schedule and clipping. A step has two micro-batches of TRL, but for the
losses that TRL defines over a micro-batch, where it has one. A plain loop of PyTorch takes the place of TRL where it has no trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from agentrl.algo.objectives.distill import DistillOptions
from agentrl.algo.objectives.dpo import DpoOptions
from agentrl.algo.objectives.kto import KtoOptions
from agentrl.algo.objectives.orpo import OrpoOptions
from agentrl.algo.objectives.reward_model import RewardModelOptions
from agentrl.algo.objectives.sft import SftOptions
from agentrl.algo.options import NoOptions
from agentrl.tune.learner_rows import RowMaker
from tests.learner_support import VOCABULARY, write_model, write_tokenizer
from tests.unit.learner.test_row_objective import formula, load, named, started

STEPS, BATCH = 40, 8
SAME = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
"""Settings of the optimizer that both systems have; gradients of the first steps are longer than this norm."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Case:
    """A method, its options here, and its trainer and options there."""

    method: str
    options: Any
    trainer: str
    theirs: dict[str, Any] = field(default_factory=dict)
    whole_step: bool = False  # the loss of TRL is that of a micro-batch


def dpo(loss: str, theirs: dict[str, float] | None = None, *, whole_step: bool = False, **rest: Any) -> Case:
    """A loss of pairs; `theirs` are weights of losses of TRL, if it has none of this name."""
    weights = theirs or {loss: 1.0}
    options = DpoOptions(loss=loss, beta=0.3, **rest)  # type: ignore[arg-type]
    trl = {"beta": 0.3, "loss_type": [*weights], "loss_weights": [*weights.values()], **rest}
    return Case("dpo", options, "DPO", trl, whole_step)


KTO = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
CASES = {
    "sft": Case("sft", SftOptions(), "SFT"),
    "dpo": dpo("sigmoid"),
    "dpo, ipo": dpo("ipo"),
    # With e the share of wrong labels, TRL's robust loss is ((1 - e) L - e M) / (1 - 2 e), and cDPO, which it lacks, (1 - e) L + e M.
    "dpo, cdpo": dpo("cdpo", {"sigmoid": 2 * (1 - 0.2), "robust": -(1 - 2 * 0.2)}, label_smoothing=0.2),
    "dpo, robust": dpo("robust", label_smoothing=0.2),
    "dpo, aot": dpo("aot", whole_step=True),
    "dpo, aot_unpaired": dpo("aot_unpaired", whole_step=True),
    "kto": Case("kto", KtoOptions(**KTO), "KTO", KTO, whole_step=True),
    "orpo": Case("orpo", OrpoOptions(beta=0.25), "ORPO", {"beta": 0.25}, whole_step=True),
    "reward-model": Case("reward-model", RewardModelOptions(center_rewards_coefficient=0.1), "Reward", {"center_rewards_coefficient": 0.1}),
}


def rows_of(method: str) -> list[dict[str, Any]]:
    """Rows of random tokens, of which prompts and answers differ in length; a prompt for ORPO is one token.

    TRL's ORPO trains the tokens of prompts too, of which the first is predicted by none.
    """
    generator = torch.Generator().manual_seed(11)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()

    rows: list[dict[str, Any]] = []
    for number in range(STEPS * BATCH):
        prompt, first, second = tokens(1, 2 if method == "orpo" else 12), tokens(1, 14), tokens(1, 14)
        if method in ("sft", "distill"):
            rows.append({"input_ids": prompt + first, "labels": [-100] * len(prompt) + first})
        elif method == "process-reward-model":
            labels = [-100] * len(prompt) + [number % 2] + [-100] * (len(first) - 1) + [0.25 * (number % 4)]
            rows.append({"input_ids": [*prompt, *first, 2], "labels": labels})
        elif method == "kto":
            rows.append({"prompt_ids": prompt, "completion_ids": first, "label": number % 3 > 0})
        else:
            rows.append({"prompt_ids": prompt, "chosen_ids": first, "rejected_ids": second, "margin": 0.1 * (number % 4)})
    return rows


def as_trl_has_it(method: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the columns that a trainer of TRL collates."""
    if method == "kto":
        # The answer before it in the step, the last one's for the first.
        others = [rows[place - 1 if place % BATCH else place + BATCH - 1]["completion_ids"] for place in range(len(rows))]
        return [{**row, "KL_completion_ids": other} for row, other in zip(rows, others, strict=True)]
    if method == "reward-model":
        return [
            {**{name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")}, "margin": row["margin"]} for row in rows
        ]
    if method == "orpo":
        return [answers_of(row) for row in rows]
    return [{name: value for name, value in row.items() if name != "margin"} for row in rows]


def answers_of(row: dict[str, Any]) -> dict[str, Any]:
    """A pair in the columns that TRL's ORPO makes of texts."""
    prompt = row["prompt_ids"]
    found: dict[str, Any] = {"prompt": "", "chosen": "", "rejected": ""}
    found |= {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for name in ("chosen", "rejected"):
        ids = prompt + row[f"{name}_ids"]
        labels = [-100] * len(prompt) + row[f"{name}_ids"]
        found |= {f"{name}_input_ids": ids, f"{name}_attention_mask": [1] * len(ids), f"{name}_labels": labels}
    return found


def losses_of_trl(
    case: Case, rows: list[dict[str, Any]], model: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The losses that a trainer of TRL reports, step by step."""
    import trl
    from datasets import Dataset

    if case.trainer == "ORPO":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer

        monkeypatch.setattr(Trainer, "tokenize_row", lambda _, row, model=None: row)
    else:
        Config, Trainer = (getattr(trl, f"{case.trainer}{part}") for part in ("Config", "Trainer"))
        monkeypatch.setattr(Trainer, "_prepare_dataset", lambda _, dataset, *rest, **named: dataset)
    monkeypatch.setattr(Trainer, "_get_train_sampler", lambda self, *_: SequentialSampler(self.train_dataset))
    parts = 1 if case.whole_step else 2
    config = Config(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // parts,
        gradient_accumulation_steps=parts,
        num_train_epochs=1,
        lr_scheduler_type="cosine",
        adam_beta2=0.999,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **SAME,
        **case.theirs,
    )
    kind = AutoModelForSequenceClassification if case.method == "reward-model" else AutoModelForCausalLM
    extra = {"num_labels": 1} if case.method == "reward-model" else {}
    given: dict[str, Any] = {"model": kind.from_pretrained(model, dtype=torch.float32, **extra)}
    if case.method in ("dpo", "kto"):
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    trainer = Trainer(
        **given,
        args=config,
        train_dataset=Dataset.from_list(as_trl_has_it(case.method, rows)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def losses_of_ours(case: Case, rows: list[dict[str, Any]], model: str, other: str) -> list[float]:
    """The losses of the learner; micro-batches of 100 tokens have a few rows each."""
    learner = {**SAME, "lr_schedule": "cosine", "adam_betas": (0.9, 0.999), "micro_batch_tokens": 100}
    state = started(model, case.method, case.options, other, num_steps=STEPS, **learner)
    make = RowMaker(case.method)
    return [state.train_rows(step, make(rows[step * BATCH : (step + 1) * BATCH]))["loss"] for step in range(STEPS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A language model, another one for the reference and the teacher, a reward model, and one of steps."""
    from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaForTokenClassification

    folder = tmp_path_factory.mktemp("models")
    found = {"policy": write_model(folder / "policy", pad_token_id=0), "other": write_model(folder / "other", seed=3, pad_token_id=0)}
    torch.manual_seed(7)
    for name, kind, labels in (("judge", LlamaForSequenceClassification, 1), ("steps", LlamaForTokenClassification, 2)):
        kind(LlamaConfig.from_pretrained(found["policy"], num_labels=labels)).save_pretrained(folder / name)
        write_tokenizer(folder / name)
        found[name] = str(folder / name)
    return found


@pytest.mark.parametrize("name", CASES)
def test_forty_steps_have_the_losses_of_trl(name: str, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    rows, model = rows_of(case.method), models["judge" if case.method == "reward-model" else "policy"]
    theirs = losses_of_trl(case, rows, model, models["other"], tmp_path, monkeypatch)
    ours = losses_of_ours(case, rows, model, models["other"])
    assert len(ours) == len(theirs) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5, rel=3e-6)
    assert len({round(loss, 3) for loss in ours}) > STEPS // 2


PLAIN = [
    Case("process-reward-model", NoOptions(), "steps"),
    *(Case("distill", DistillOptions(beta=beta, temperature=1.5), "policy") for beta in (0.0, 0.5, 1.0)),
]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: named((case.method, case.options)))
def test_forty_steps_have_the_losses_of_a_plain_loop(case: Case, models: dict[str, str]) -> None:
    rows, make, model = rows_of(case.method), RowMaker(case.method), models[case.trainer]
    kind = AutoModelForTokenClassification if case.trainer == "steps" else AutoModelForCausalLM
    plain, teacher, expected = kind.from_pretrained(model, dtype=torch.float32), load(models["other"]), []
    matrices, vectors = ([part for part in plain.parameters() if (part.ndim > 1) == whole] for whole in (True, False))
    groups = [{"params": matrices, "weight_decay": SAME["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SAME["learning_rate"], betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    for step in range(STEPS):
        loss = formula(case.method, case.options, make(rows[step * BATCH : (step + 1) * BATCH]), plain, teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), SAME["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        expected.append(loss.item())
    ours = losses_of_ours(case, rows, model, models["other"])
    assert ours == pytest.approx(expected, abs=1e-5, rel=3e-6)
    assert len({round(loss, 3) for loss in ours}) > STEPS // 2
