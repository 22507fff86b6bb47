"""A reward in OpenRLHF's form."""

import torch


def reward_func(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    right = torch.tensor([float(label in answer) for answer, label in zip(answers, labels, strict=True)])
    lengths = torch.tensor([float(len(answer)) for answer in answers])
    return {"rewards": right - 0.001 * lengths, "scores": right, "extra_logs": {"length": lengths}}
