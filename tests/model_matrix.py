"""Writes docs/models.md: what `agentrl certify` finds for every family of causal language models in the installed transformers.

python -m tests.model_matrix [FAMILY ...]
python -m tests.model_matrix --check K/N    # certify the K-th of N parts, and compare with the page
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.certify.before import NOISE
from agentrl.certify.results import Certificate, Verdict

LIMIT_S, LIMIT_CPU_S, LIMIT_BYTES = 240.0, 60, 8 << 30
PAGE = Path("docs/models.md")
LARGE = Path("tests/model_configs")
FOUND = Path("build/certified.json")
COLUMNS = {
    "eager": "eager, padded",
    "sdpa": "sdpa, padded",
    "sdpa, shared": "sdpa, prefix trees",
    "varlen": "varlen, packed",
    "varlen, shared": "varlen, prefix trees",
    "LoRA": "LoRA and its merge",
    "engine": "transformers",
}
INTRO = """\
# Families of models

<!-- Written by `make models`; do not edit. -->

Families of causal language models in transformers {transformers}, as [`agentrl certify`](certify.md) finds them.
Each is a small twin of the family's default configuration, with torch {torch} in float32 on a CPU.
Fields for dropout and other noise that are 0 by default are set to 0.1, since checkpoints have their own.
Kernels for GPUs were not run.

| cell | meaning |
|---|---|
| exact | equal to passes of the model itself over one row at a time, with its own attention: log-probabilities and gradients |
| **wrong** | not equal |
| refused | the learner or the engine refuses the combination by itself, or raises an error |
| not used | the learner does not choose this layout for the family, and pads or repeats prompts instead |

*engine* is `--engine transformers`, which compares log-probabilities of what it samples.
*shared* are rows that begin with the same tokens, as a prefix tree.
*vLLM* says whether vLLM {vllm} has the family's class; `agentrl certify --vllm` compares what it computes.
[Chat templates](chat_templates.md) belong to a tokenizer, not to a family; `agentrl certify DIRECTORY` compares them.
"""
PICTURES = "images:"
"""Beginning of the names of families that read images, which are certified with their vision part."""
READ_IMAGES = ("gemma3", "gemma4", "idefics3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
IMAGES = """
## Families that read images

Twins of both parts, on rows with images in prompts and in later turns. [Images](vision.md#which-models) says which of
these families need torchvision, and which vLLM takes.

"""
CONFIGURATIONS = """
## Configurations of large models

Twins of these configurations, on two cores.

"""


def families() -> list[str]:
    """Types of causal language models that read text from left to right, each text part once."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: dict[str, str] = {}
    for name in NAMES:
        try:
            config = CONFIG_MAPPING[name]().get_text_config()
        except Exception:  # a configuration that has no defaults says so in one of many ways
            continue
        if not getattr(config, "is_encoder_decoder", False) and getattr(config, "is_decoder", True):
            found.setdefault(config.model_type, name)
    return sorted(found.values())


def in_vllm() -> set[str]:
    """Return the names of the classes of models that vLLM has."""
    from vllm import ModelRegistry

    return set(ModelRegistry.get_supported_archs())


def _configuration(name: str) -> Any:
    """Return the configuration of a file, or the default one of a family with noise where it has none."""
    from transformers import CONFIG_MAPPING

    from agentrl.certify.configs import read_config

    if name.endswith(".json"):
        return read_config(LARGE / name)
    if name.startswith(PICTURES):
        return image_configuration(name.removeprefix(PICTURES))
    config = CONFIG_MAPPING[name]().get_text_config()
    for field, value in config.to_dict().items():
        if isinstance(value, float) and value == 0.0 and any(part in field for part in NOISE):
            setattr(config, field, 0.1)
    return config


def image_configuration(name: str) -> Any:
    """Return the default configuration of a family that reads images, with what its checkpoints have beside it."""
    from transformers import CONFIG_MAPPING

    own: dict[str, Any] = {}
    if name.startswith("qwen"):
        own = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}}
    if name == "gemma4":
        own = {"vision_config": CONFIG_MAPPING["gemma4_vision"](), "text_config": {"use_bidirectional_attention": "vision"}}
    return CONFIG_MAPPING[name](**own)


def _certify(name: str, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    from agentrl.certify.run import certify

    config = _configuration(name)
    try:
        answers.put(certify(name, config).to_dict())
    except Exception as error:
        answers.put({"model": name, "error": str(getattr(error, "problem", error)).strip().splitlines()[0]})


def certified(name: str) -> dict[str, Any]:
    """Return the certificate of a family, made in a process with limits of time and memory, or why there is none."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_certify, args=(name, answers))
    process.start()
    found: dict[str, Any] = {"model": name, "error": f"no verdict within {LIMIT_CPU_S} s"}
    begun = time.monotonic()
    while process.is_alive() and time.monotonic() - begun < LIMIT_S:
        with contextlib.suppress(queue.Empty):
            found = answers.get(timeout=1.0)
            break
    process.kill()
    process.join()
    return found


def page(found: Sequence[dict[str, Any]], missing: int, vllm: Callable[[str], bool]) -> str:
    """Return docs/models.md; `missing` families are not among those that were certified, and `vllm` says which families vLLM has."""
    import vllm as engine

    versions = {name: version(name).partition("+")[0] for name in ("transformers", "torch")}
    lines = [INTRO.format(vllm=engine.__version__.partition("+")[0], **versions)]
    large = [Certificate.from_dict(each) for each in found if each["model"].endswith(".json")]
    pictures = [Certificate.from_dict(each) for each in found if each["model"].startswith(PICTURES) and "error" not in each]
    found = [each for each in found if not each["model"].endswith(".json") and not each["model"].startswith(PICTURES)]
    known = [Certificate.from_dict(each) for each in found if "error" not in each]
    counts = {verdict: sum(each.verdict is verdict for each in known) for verdict in Verdict}
    total = f"{len(found)} families: {counts[Verdict.EXACT]} exact, {counts[Verdict.WRONG]} with something wrong, "
    lines += [f"{total}{len(found) - counts[Verdict.EXACT] - counts[Verdict.WRONG]} that cannot be tried."]
    lines += [f"{missing} further families have not been certified; `make models` certifies all.", ""] if missing else [""]
    lines += [_heads("family", "verdict", *COLUMNS, "vLLM")]
    lines += [_row(each.model_type, each, "has it" if vllm(each.model) else "no") for each in known]
    lines += image_lines(pictures)
    lines += [CONFIGURATIONS + _heads("configuration", "verdict", *COLUMNS, "seconds")]
    lines += [_row(Path(each.model).stem, each, f"{each.seconds:.1f}") for each in large]
    wrong = [(each.model_type, comparison) for each in known for comparison in each.wrong]
    lines += ["", "## Wrong", "", _heads("family", "part", "difference, nats", "reason")] if wrong else []
    lines += [f"| `{name}` | {part.name} | {part.logprob:.1g} | {part.reason} |" for name, part in wrong]
    lines += ["", "## Cannot be tried", "", _heads("family", "reason")]
    lines += [f"| `{each['model']}` | {_plain(each['error'])} |" for each in found if "error" in each]
    reasons = {each.model_type: next(part.reason for part in each.comparisons) for each in known if each.verdict is Verdict.UNTRIED}
    lines += [f"| `{name}` | {_plain(reason)} |" for name, reason in reasons.items()]
    return "\n".join(lines) + "\n"


def image_lines(pictures: Sequence[Certificate]) -> list[str]:
    """Return the lines of the table of families that read images."""
    heads = IMAGES + _heads("family", "verdict", *COLUMNS, "seconds")
    return [heads, *(_row(each.model_type, each, f"{each.seconds:.1f}") for each in pictures)] if pictures else []


def _heads(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")[:160]


def _row(name: str, certificate: Certificate, last: str) -> str:
    cells = (_cell(certificate, part) for part in COLUMNS.values())
    return f"| `{name}` | {_bold(certificate.verdict)} | {' | '.join(cells)} | {last} |"


def _cell(certificate: Certificate, name: str) -> str:
    verdicts = {each.verdict for each in certificate.comparisons if each.name == name or each.name.startswith(f"{name}, ")}
    whole = {each.name for each in certificate.comparisons if each.verdict is Verdict.UNTRIED}
    if not verdicts:
        return "refused" if name.partition(",")[0] in whole else "not used"
    if Verdict.WRONG in verdicts:
        return _bold(Verdict.WRONG)
    return "exact" if Verdict.EXACT in verdicts else "refused"


def _bold(verdict: Verdict) -> str:
    return f"**{verdict}**" if verdict is Verdict.WRONG else str(verdict)


def every_name() -> list[str]:
    """Return all that is certified: families, families that read images, and configurations of large models."""
    return [*families(), *(PICTURES + name for name in READ_IMAGES), *sorted(file.name for file in LARGE.glob("*.json"))]


def differing(found: Sequence[dict[str, Any]], text: str) -> list[str]:
    """Return what was found and is not on the page with the text `text`, times and reasons apart."""
    rows = {row.rpartition(" | ")[0] for row in text.splitlines()}
    lines = []
    for each in found:
        if "error" in each:
            row = f"| `{each['model']}`"
        else:
            name = Path(each["model"]).stem if each["model"].endswith(".json") else each["model_type"]
            row = _row(name, Certificate.from_dict(each), "").rpartition(" | ")[0]
        lines += [] if row in rows else [f"{row} is not in {PAGE}"]
    return lines


def check(part: str) -> int:
    """Certify a part of all names, print what is not as on the page, and return the exit code."""
    number, count = map(int, part.split("/"))
    names = every_name()[number - 1 :: count]
    lines = differing([certified(name) for name in names], PAGE.read_text(encoding="utf-8"))
    sys.stdout.write("".join(f"{line}\n" for line in lines) + f"{len(names)} names, {len(lines)} differ\n")
    return int(bool(lines))


def main(names: Sequence[str]) -> int:
    """Certify families one after the other, keep what was found as JSON, and write the page; or check a part of it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import agentrl.certify.run  # noqa: F401 - once for all processes

    if names[:1] == ["--check"]:
        return check(names[1])
    kept = {} if not names or not FOUND.is_file() else {each["model"]: each for each in json.loads(FOUND.read_text(encoding="utf-8"))}
    for name in names or every_name():
        kept[name] = certified(name)
        sys.stdout.write(f"{name}: {kept[name].get('verdict', kept[name].get('error'))}\n")
        sys.stdout.flush()
        FOUND.parent.mkdir(exist_ok=True)
        FOUND.write_text(json.dumps([kept[key] for key in sorted(kept)], indent=1) + "\n", encoding="utf-8")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    missing, classes = len(set(families()) - kept.keys()), in_vllm()
    written = page([kept[key] for key in sorted(kept)], missing, lambda name: bool(classes & set(np.atleast_1d(NAMES[name]))))
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
