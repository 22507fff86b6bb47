"""``--resume``: which checkpoint to continue from, with which settings, and what is taken back from the records."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.config.evaluate import PlayConfig
from agentrl.config.load import flag_value, to_json
from agentrl.config.plugins import check_files_unchanged
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import flag
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.core.files import complete_file
from agentrl.core.protocols import Learner
from agentrl.core.remote import absolute, check_address, check_reachable, get_files, is_address
from agentrl.env.given import PREFIX
from agentrl.flow.checkpoint import CONFIG, FOLDER, LEARNER, Progress, check_learner_files, latest_checkpoint, read_checkpoint
from agentrl.flow.uploads import CheckpointCopy, fetch_copy, find_copy, read_copy, step_of
from agentrl.track.index import index_path, parsed
from agentrl.track.jsonl import read_lines
from agentrl.track.sinks import EVAL_TRAJECTORIES

AUTO = "auto"

MAY_CHANGE = frozenset(
    {
        *("num_steps", "run_dir", "save_every", "keep_checkpoints", "checkpoint_upload", "upload_timeout_s", "resume"),
        *("runtime", "ray_address", "stall_timeout_s", "debug"),
        *("check_env", "check_memory"),
        *("stop_timeout_s", "max_learner_restarts", "max_engine_restarts", "engine_timeout_s", "publish_timeout_s"),
        *("reset_timeout_s", "step_timeout_s", "episode_timeout_s", "env_threads", "max_concurrent_episodes", "rollout_workers_per_engine"),
        *("num_learners", "zero_stage", "num_engines", "colocate", "sleep_level", "learner_memory_gib"),
        *("max_num_seqs", "kv_cache_gib", "gpu_memory_utilization", "enforce_eager"),
        *("micro_batch_tokens", "gradient_checkpointing", "max_nonfinite_steps"),
        *("min_pass_rate", "max_attempts", "max_failure_rate"),
        *(
            "record",
            "record_requests",
            "annotate",
            "tensorboard",
            "wandb_project",
            "trackio_project",
            "save_model",
            "sink",
            "callback",
            "callback_timeout_s",
        ),
        *("eval_every", "eval_at_start", "eval_samples", "eval_temperature", "eval_by", "eval_pass_score", "keep_best"),
    }
)
"""Settings that a resumed run may have otherwise; they decide where and how fast it goes, not what is learnt."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Start of a run: its progress and its checkpoint, in the run's directory or a copy elsewhere; without one, the very beginning."""

    progress: Progress
    checkpoint: Path | None = None
    copy: CheckpointCopy | None = None

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
    if config.run.resume != AUTO:
        place = config.run.resume
        return config.run.run_dir if place and _copy_at(place) else Path(place).expanduser() if place else None
    if config.run.run_dir is None:
        raise ConfigError("--resume", AUTO, "needs to know which run", "Give --run-dir, the same each time.")
    path = config.run.run_dir.expanduser()
    return path if (path / "config.json").exists() else None


def resume_point(config: TrainConfig) -> ResumePoint:
    """Find where the run in ``config.run.run_dir`` stands, and check that it can go on with these settings.

    The newest complete checkpoint counts, in the run's directory, at ``--resume``, or at ``--checkpoint-upload``.

    Raises:
        ConfigError: If ``--resume DIR`` finds no complete checkpoint, or a setting was changed that must stay, or the file of a plug-in;
            or if ``--checkpoint-upload`` cannot be used, or holds another run.
        CheckpointError: If the checkpoint cannot be read.
    """
    run_dir, resume, upload = config.run.run_dir, config.run.resume, config.run.checkpoint_upload
    copy = _newest_copy(config)
    if not resume or run_dir is None:
        if copy is not None:
            remedy = "Give another folder, or continue that run with --resume."
            raise ConfigError("--checkpoint-upload", upload, "already holds the checkpoints of a run", remedy)
        return ResumePoint(Progress())
    path = latest_checkpoint(run_dir)
    if path is not None and (copy is None or copy.step <= step_of(path)):
        progress, saved = read_checkpoint(path)
        point = ResumePoint(progress, path)
    elif copy is not None:
        progress, saved, _ = read_copy(copy)
        point = ResumePoint(progress, copy=copy)
    elif resume == AUTO:
        return ResumePoint(Progress())
    else:
        raise ConfigError("--resume", resume, *_nothing_to_resume(run_dir))
    steps = config.run.num_steps
    if resume != AUTO and _ended(run_dir).get("status") == "finished" and _ended(run_dir).get("steps", 0) >= steps:
        problem = f"has finished: it did its {progress.step} steps"
        raise ConfigError("--resume", resume, problem, f"Give --num-steps more than {progress.step} to train it further.")
    _check_unchanged(saved, config)
    check_files_unchanged(config, run_dir, MAY_CHANGE)
    return point


def _newest_copy(config: TrainConfig) -> CheckpointCopy | None:
    """Return the newest copy at ``--resume`` and ``--checkpoint-upload``, which must be there to be written to."""
    resume, upload = config.run.resume, config.run.checkpoint_upload
    found = [_copy_at(resume)] if resume not in ("", AUTO) else []
    if upload:
        check_reachable("--checkpoint-upload", absolute(upload))
        found.append(find_copy(absolute(upload)))
    return max((copy for copy in found if copy is not None), key=lambda copy: copy.step, default=None)


def saved_so_far(run_dir: Path | None) -> str:
    """Return what a run that is ended at once leaves behind, for a message; checkpoints are there only when they are complete."""
    if run_dir is None or not run_dir.is_dir():
        return "nothing was saved"
    saved = sorted((run_dir / FOLDER).glob("step-*"))
    if saved:
        step = int(saved[-1].name.removeprefix("step-"))
        return f"the checkpoint of step {step} is saved, continue with: agentrl train --resume {run_dir}"
    return f"no checkpoint is saved (--save-every N writes one every N steps); metrics and episodes so far are in {run_dir}"


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


def make_run_dir(path: Path) -> None:
    """Make the directory of a run.

    Raises:
        ConfigError: If it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--run-dir", str(path), f"cannot be made: {error.strerror}", "Name a directory that you may write to.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("--run-dir", str(path), "may not be written to", "Change its permissions, or name another directory.")


def _check_unchanged(saved: Mapping[str, Any], config: TrainConfig) -> None:
    asked, defaults = json.loads(to_json(config)), json.loads(to_json(TrainConfig()))
    fixed = MAY_CHANGE if config.learner.lr_schedule == "constant" else MAY_CHANGE - {"num_steps"}
    changed = [
        f"{flag(name)} (was {saved.get(section, {}).get(name)!r}, now {value!r})"
        for section, values in asked.items()
        for name, value in values.items()
        if name not in fixed and saved.get(section, {}).get(name, defaults[section][name]) != value  # a setting newer than the run
    ]
    if changed:
        problem = "cannot go on, because it would be another run with " + ", ".join(changed)
        raise ConfigError("--resume", config.run.resume, problem, "Leave these as they were, or start a new run.")


def rewind_records(run_dir: Path, progress: Progress) -> list[dict[str, Any]]:
    """Take back what was recorded after the checkpoint, since it will happen again, and return the metrics of the steps that stay."""
    repeated = {group_id for group_id, *_ in progress.open_groups}

    def is_closed(group_id: int | None) -> bool:  # a record too large to be kept has no id
        return group_id is None or (group_id < progress.next_group_id and group_id not in repeated)

    for name in ("trajectories.jsonl", "requests.jsonl", "groups.jsonl"):
        _filter_lines(run_dir / name, lambda row: is_closed(row.get("group_id")))
    index_path(run_dir / "trajectories.jsonl").unlink(missing_ok=True)

    def stays(row: dict[str, Any]) -> bool:  # without a checkpoint, what was measured before the first step is measured again too
        return bool(progress.step) and row["step"] <= progress.step

    _filter_lines(run_dir / EVAL_TRAJECTORIES, lambda row: stays({"step": row.get("version", 0)}))
    index_path(run_dir / EVAL_TRAJECTORIES).unlink(missing_ok=True)
    for name in ("evaluations.jsonl", "steps.jsonl", "annotations.jsonl", "metrics.jsonl"):
        _filter_lines(run_dir / name, stays)
    return read_lines(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []


def _filter_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Keep some lines of a file, one in memory at a time; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return
    with complete_file(path) as partial, path.open("rb") as lines, partial.open("wb") as kept:
        for line in lines:
            if not line.endswith(b"\n"):
                line = line + b"\n" if parsed(line) is not None else b""
            if line.strip() and keep(json.loads(line)):
                kept.write(line)


def agent_name(config: PlayConfig) -> str:
    """Return a short name of the environment, for the names of directories."""
    return Path(config.run.agent.removeprefix(PREFIX).partition(":")[0]).stem or "run"


def _new_run_dir(config: TrainConfig) -> Path:
    """Return the directory of a new run, which must not hold another run; one that never made a step may be tried again.

    Raises:
        ConfigError: If it is taken.
    """
    if config.run.run_dir is None:
        return Path("runs") / f"{agent_name(config)}-{datetime.now():%Y%m%d-%H%M%S}"
    path = config.run.run_dir.expanduser()
    there = next(part for part in (path, *path.absolute().parents) if os.path.exists(part))
    if not there.is_dir():
        problem = "is a file" if there == path else f"cannot be made: {there} is a file"
        raise ConfigError("--run-dir", str(path), problem, "Name a directory that is new or empty.")
    metrics = path / "metrics.jsonl"
    if os.path.exists(metrics) and any(row.get("step", 1) for row in read_lines(metrics)):
        raise ConfigError("--run-dir", str(path), "already holds a run", "Choose another directory, or continue it with --resume.")
    if os.path.exists(path / "eval.json"):  # pathlib's raises if the folder may not be read
        raise ConfigError("--run-dir", str(path), "already holds an evaluation", "Choose another directory.")
    return path


def with_directory(config: TrainConfig) -> TrainConfig:
    """Return the configuration with its run's directory filled in: the resumed one, or a new one.

    Raises:
        ConfigError: If the directory is taken, or there is no run to resume.
    """
    run_dir = resumed_run_dir(config) or _new_run_dir(config)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir=run_dir))
