"""``--resume``: the checkpoint that a run goes on from, and the settings that it had."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.load import flag_value
from agentrl.config.mapping import differences, flattened
from agentrl.config.model_defaults import settled_engine
from agentrl.config.plugins import check_files_unchanged
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.protocols import Learner
from agentrl.core.remote import absolute, check_address, check_reachable, get_files, is_address
from agentrl.engine.facts import installed_engine
from agentrl.env.agent_spec import AgentSpec
from agentrl.flow.checkpoint import CONFIG, INPUTS, LEARNER, Progress, check_learner_files, latest_checkpoint, read_checkpoint, read_inputs
from agentrl.flow.uploads import CheckpointCopy, fetch_copy, find_copy, read_copy, step_of

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Start of a run: its progress and its checkpoint, in the run's directory or a copy elsewhere; without one, the very beginning.

    `inputs` is the manifest in the checkpoint, of `agentrl.resolve.inputs`; empty without one.
    """

    progress: Progress
    checkpoint: Path | None = None
    copy: CheckpointCopy | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)

    async def restore(self, run_dir: Path, learner: Learner) -> Path | None:
        """Fetch the checkpoint if it is a copy, check it, and have the learner load it; returns where it is now.

        Raises:
            CheckpointError: If a file is not what the manifest says.
        """
        path = self.checkpoint
        if self.copy is not None:
            path = await fetch_copy(self.copy, run_dir, learner)
        elif path is not None:
            await check_learner_files(path, learner)
        if path is not None:
            await learner.load_checkpoint(str(path / LEARNER))
        return path


def with_saved_settings(words: list[str]) -> list[str]:
    """Let ``--resume DIR`` bring the settings of the run in DIR, which flags may then change.

    Raises:
        ConfigError: If DIR holds no run.
    """
    given = flag_value(words, "--resume")
    if given in (None, "", AUTO) or flag_value(words, "--config") is not None:
        return words
    return ["--config", str(saved_settings(str(given))), *words]


def saved_settings(run_dir: str) -> Path:
    """Return the file with the settings of a run.

    Raises:
        ConfigError: If the directory holds no run.
    """
    if (copy := _copy_at(run_dir)) is not None:
        # The caller reads the file later, so that its folder stays until the process ends.
        folder = tempfile.mkdtemp(prefix="agentrl-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        get_files({CONFIG: copy.files[CONFIG]}, copy.address, folder)
        return Path(folder, CONFIG)
    saved = Path(run_dir).expanduser() / CONFIG
    if not saved.is_file():
        raise ConfigError("--resume", run_dir, "holds no run", "Name a run's directory, as printed at its end, or its --checkpoint-upload.")
    return saved


def _copy_at(place: str) -> CheckpointCopy | None:
    """Return the newest copy of a checkpoint at a place that is no run's directory; `None` if it is one, or holds nothing.

    Raises:
        ConfigError: If it is an address that cannot be read, or has no complete copy.
    """
    if not is_address(place):
        path = Path(place).expanduser()
        return None if path.joinpath("checkpoints").exists() or not path.is_dir() else find_copy(absolute(place))
    check_address("--resume", place)
    try:
        copy = find_copy(absolute(place))
    except CheckpointError as error:
        raise ConfigError("--resume", place, f"cannot be read: {error}", "Mend the address or its credentials.") from error
    if copy is None:
        raise ConfigError("--resume", place, "holds no complete checkpoint", "Name the --checkpoint-upload of a run.")
    return copy


def resumed_run_dir(config: TrainConfig) -> Path | None:
    """Return the directory of the run that ``--resume`` continues; `None` if there is nothing to continue.

    Raises:
        ConfigError: If ``auto`` comes without ``--run-dir``.
    """
    if config.training.resume != AUTO:
        place = config.training.resume
        return config.training.run_dir if place and _copy_at(place) else Path(place).expanduser() if place else None
    if config.training.run_dir is None:
        raise ConfigError("--resume", AUTO, "needs to know which run", "Give --run-dir, the same each time.")
    path = config.training.run_dir.expanduser()
    return path if (path / "config.json").exists() else None


def resume_point(config: TrainConfig) -> ResumePoint:
    """Find where the run in ``config.training.run_dir`` stands, and check that it can go on with these settings.

    The newest complete checkpoint counts, in the run's directory, at ``--resume``, or at ``--checkpoint-upload``.

    Raises:
        ConfigError: If ``--resume DIR`` finds no complete checkpoint, or a setting was changed that must stay, or the file of a plug-in;
            or if ``--checkpoint-upload`` cannot be used, or holds another run.
        CheckpointError: If the checkpoint cannot be read.
    """
    point, saved = _newest(config)
    run_dir, resume, steps = config.training.run_dir, config.training.resume, config.training.num_steps
    if run_dir is None or not saved:
        return point
    if resume != AUTO and _ended(run_dir).get("status") == "finished" and _ended(run_dir).get("steps", 0) >= steps:
        problem = f"has finished: it did its {point.progress.step} steps"
        raise ConfigError("--resume", resume, problem, f"Give --num-steps more than {point.progress.step} to train it further.")
    _check_unchanged(saved, config)
    check_files_unchanged(config, run_dir)
    return point


def chosen_engine(config: TrainConfig, agent: AgentSpec) -> tuple[str, str]:
    """Return the engine that ``--engine auto`` stands for, and a line about it where that is not the usual one.

    A run that goes on keeps the engine that it began with, so the command that began it also resumes it. An agent that calls the model
    itself keeps vLLM: it may ask for structured outputs at any time, which no other engine has.

    Raises:
        ConfigError: As `resume_point`, but for changed settings.
        CheckpointError: If the checkpoint cannot be read.
    """
    if config.training.resume and (saved := _newest(config)[1]):
        return flattened(saved).get("engine", AUTO), ""
    return (installed_engine(), "") if agent.kind.calls_model else settled_engine(config)


def _newest(config: TrainConfig) -> tuple[ResumePoint, Mapping[str, Any]]:
    """Return the newest complete checkpoint, in the run's directory or a copy, and its settings; without one the beginning, and none."""
    run_dir, resume, upload = config.training.run_dir, config.training.resume, config.training.checkpoint_upload
    copy = _newest_copy(config)
    if not resume or run_dir is None:
        if copy is not None:
            remedy = "Give another folder, or continue that run with --resume."
            raise ConfigError("--checkpoint-upload", upload, "already holds the checkpoints of a run", remedy)
        return ResumePoint(Progress()), {}
    path = latest_checkpoint(run_dir)
    # Of two at the same step the one in the run's directory is taken, which need not be fetched.
    if path is not None and (copy is None or copy.step <= step_of(path)):
        progress, saved = read_checkpoint(path)
        return ResumePoint(progress, path, inputs=read_inputs(path)), saved
    if copy is not None:
        progress, saved, texts = read_copy(copy)
        return ResumePoint(progress, copy=copy, inputs=json.loads(texts.get(INPUTS, "{}"))), saved
    if resume == AUTO:
        return ResumePoint(Progress()), {}
    raise ConfigError("--resume", resume, *_nothing_to_resume(run_dir))


def _newest_copy(config: TrainConfig) -> CheckpointCopy | None:
    """Return the newest copy at ``--resume`` and ``--checkpoint-upload``, which must be there to be written to."""
    resume, upload = config.training.resume, config.training.checkpoint_upload
    found = [_copy_at(resume)] if resume not in ("", AUTO) else []
    if upload:
        check_reachable("--checkpoint-upload", absolute(upload))
        found.append(find_copy(absolute(upload)))
    return max((copy for copy in found if copy is not None), key=lambda copy: copy.step, default=None)


def _ended(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that has ended; empty if there is none."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _nothing_to_resume(run_dir: Path) -> tuple[str, str]:
    """Return the problem with a run without a checkpoint, and the remedy."""
    if _ended(run_dir).get("status") == "finished" and (run_dir / "model" / "config.json").is_file():
        remedy = f"Begin a new run with its model: --model {run_dir / 'model'}; with --save-every N it can be resumed."
        return "holds no complete checkpoint, and the run has finished", remedy
    remedy = "Start it again without --resume, with --save-every N; a smaller N writes the first checkpoint earlier."
    return "holds no complete checkpoint: the run ended before its first one, or was started without --save-every", remedy


def _check_unchanged(saved: Mapping[str, Any], config: TrainConfig) -> None:
    fixed = () if config.learner.lr_schedule == "constant" else ("num_steps",)
    if others := differences(saved, config, fixed):
        problem = "cannot go on, because it would be another run with " + ", ".join(others)
        raise ConfigError("--resume", config.training.resume, problem, "Leave these as they were, or start a new run.")
