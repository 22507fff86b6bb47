"""One trial of a task folder by Harbor itself, in a process of its own; needs harbor, and nothing of agentrl.

``python program.py run TRIAL FOLDER`` prints the outcome as its last line. TRIAL is a JSON object with ``agent`` (a name that Harbor
knows, or ``file.py:Class``), ``environment`` (``podman`` or ``docker``) and ``labels``, which the agent's container bears.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LATE = "AgentTimeoutError"
"""Name of the failure after which Harbor judges what the agent has done by then."""


def agent_of(name: str) -> dict[str, str]:
    """Return the part of Harbor's configuration that names an agent."""
    file, found, cls = name.partition(".py:")
    if not found:
        return {"name": name}
    path = Path(f"{file}.py").absolute()
    sys.path.insert(0, str(path.parent))
    return {"import_path": f"{path.stem}:{cls}"}


def configured(told: dict[str, Any], folder: str, scratch: Path) -> dict[str, Any]:
    """Return Harbor's configuration of a trial, which writes below a folder of its own."""
    labels = scratch / "labels.yaml"
    # JSON is YAML too, and needs no package.
    labels.write_text(json.dumps({"services": {"main": {"labels": told["labels"]}}}), encoding="utf-8")
    return {
        "task": {"path": folder},
        "trials_dir": str(scratch / "trials"),
        "agent": {**agent_of(told["agent"]), "model_name": f"openai/{os.environ['OPENAI_MODEL']}"},
        "environment": {"type": told["environment"], "extra_docker_compose": [str(labels)]},
    }


async def run_trial(told: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run the trial with the model at the address in the environment; a failure ends the process."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    with tempfile.TemporaryDirectory() as scratch:
        trial = await Trial.create(TrialConfig.model_validate(configured(told, folder, Path(scratch))))
        return outcome(await trial.run())


def outcome(result: Any) -> dict[str, Any]:
    """Return the rewards of a trial, and whether the agent's time ended it; any other failure ends the process with its text."""
    failure = result.exception_info
    if failure is not None and failure.exception_type != LATE:
        raise SystemExit(f"{failure.exception_type}: {failure.exception_message}")
    rewards = result.verifier_result.rewards if result.verifier_result is not None else None
    if not rewards:
        raise SystemExit("the tests gave no reward")
    return {"rewards": rewards, "truncated": failure is not None}


def main(words: list[str]) -> None:
    """Run a trial."""
    _, told, folder = words[:3]
    sys.path.pop(0)  # this file's folder, which has modules of other suites' names
    beside = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", "")))  # podman-compose may be there
    os.environ.setdefault("HARBOR_TELEMETRY", "off")
    result = asyncio.run(run_trial(json.loads(told), folder))
    # On a line of its own, also behind output that ends without a line break.
    sys.stdout.write(f"\n{json.dumps(result)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
