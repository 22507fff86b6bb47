"""One sample of an Inspect task, or the list of its samples, in a process of its own; needs inspect_ai and nothing of agentrl.

``python inspect_program.py list SPEC OUT`` writes the samples to a file, ``python inspect_program.py run SPEC ID`` prints the outcome of a
sample as its last line. SPEC is a JSON object with ``folder`` (of the task's file, else empty), ``task``, ``args``, ``sandbox``, ``score``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def list_samples(spec: dict[str, Any], out: str) -> None:
    """Write id, input and target of each sample."""
    from inspect_ai._eval.loader import load_tasks

    package, slash, _ = spec["task"].partition("/")
    if slash and not spec["folder"] and importlib.util.find_spec(package) is None:
        raise SystemExit(f"the package {package}, in which the task {spec['task']} is, is not installed")
    tasks = load_tasks([spec["task"]], spec["args"])
    if len(tasks) != 1:
        raise SystemExit(f"{spec['task']} stands for {len(tasks)} tasks; name one with {spec['task']}@NAME")
    samples = []
    for number, sample in enumerate(tasks[0].dataset, 1):
        asked = sample.input
        if not isinstance(asked, str):
            asked = [{"role": message.role, "content": message.text} for message in asked]
        samples.append({"id": number if sample.id is None else sample.id, "input": asked, "target": sample.target})
    Path(out).write_text(json.dumps(samples), encoding="utf-8")


async def run_sample(spec: dict[str, Any], sample_id: str | int) -> dict[str, Any]:
    """Solve and score a sample with the model at the address in the environment; a failure ends the process."""
    from inspect_ai import eval_async
    from inspect_ai.model import get_model

    model = get_model(
        f"openai/{os.environ['OPENAI_MODEL']}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        responses_api=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        (log,) = await eval_async(
            spec["task"],
            model=model,
            task_args=spec["args"],
            sample_id=[sample_id],
            epochs=1,
            log_dir=folder,
            log_realtime=False,
            fail_on_error=True,
            **({"sandbox": spec["sandbox"]} if spec["sandbox"] else {}),
        )
        if log.status != "success" or not log.samples:
            problem = log.error.message if log.error else f"the evaluation ended with status {log.status!r} and no sample {sample_id!r}"
            raise SystemExit(problem)
        return outcome(log.samples[0], spec["score"])


def outcome(sample: Any, wanted: str) -> dict[str, Any]:
    """The reward of a sample, its figures, and the limit that ended it, if one did."""
    from inspect_ai.scorer import value_to_float

    number, figures = value_to_float(), {}
    for name, score in (sample.scores or {}).items():
        parts = score.value if isinstance(score.value, dict) else {"": score.value}
        figures.update({f"{name}/{part}" if part else name: number(value) for part, value in parts.items()})
    if wanted not in figures and (wanted or len(figures) != 1):
        raise SystemExit(f"the scores are {', '.join(figures) or 'none'}; name the one that is the reward with ?score=NAME")
    return {"reward": figures[wanted] if wanted else next(iter(figures.values())), "info": figures, "truncated": sample.limit is not None}


def main(words: list[str]) -> None:
    """Run a command."""
    what, text, target = words[:3]
    spec = json.loads(text)
    if spec["folder"]:
        os.chdir(spec["folder"])  # Inspect finds files from the current folder only
    os.environ.setdefault("INSPECT_DISPLAY", "none")
    if what == "list":
        list_samples(spec, target)
    else:
        result = asyncio.run(run_sample(spec, json.loads(target)))
        # On a line of its own, also behind output that ends without a line break.
        sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
