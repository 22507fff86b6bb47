"""Records of a run that goes on from a checkpoint: what happened after it is taken back, since it will happen again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.core.files import complete_file
from agentrl.core.paths import shown_path
from agentrl.flow.checkpoint import FOLDER, Progress
from agentrl.track.index import index_path, parsed
from agentrl.track.jsonl import read_lines
from agentrl.track.sinks import EVAL_TRAJECTORIES


def saved_so_far(run_dir: Path | None) -> str:
    """Return what a run that is ended at once leaves behind, for a message; checkpoints are there only when they are complete."""
    if run_dir is None or not run_dir.is_dir():
        return "nothing was saved"
    saved = sorted((run_dir / FOLDER).glob("step-*"))
    if saved:
        step = int(saved[-1].name.removeprefix("step-"))
        return f"the checkpoint of step {step} is saved, continue with: agentrl train --resume {shown_path(run_dir)}"
    return f"no checkpoint is saved (--save-every N writes one every N steps); metrics and episodes so far are in {shown_path(run_dir)}"


def rewind_records(run_dir: Path, progress: Progress) -> list[dict[str, Any]]:
    """Take back what was recorded after the checkpoint, since it will happen again, and return the metrics of the steps that stay."""
    # These groups were under way, and are played again under the same numbers.
    repeated = {group_id for group_id, *_ in progress.open_groups}

    def is_closed(group_id: int | None) -> bool:  # a record too large to be kept has no id
        return group_id is None or (group_id < progress.next_group_id and group_id not in repeated)

    for name in ("trajectories.jsonl", "requests.jsonl", "groups.jsonl"):
        _filter_lines(run_dir / name, lambda row: is_closed(row.get("group_id")))
    # The index names places in the file as it was, and is made anew when episodes are written.
    index_path(run_dir / "trajectories.jsonl").unlink(missing_ok=True)

    def stays(row: dict[str, Any]) -> bool:  # without a checkpoint, what was measured before the first step is measured again too
        return bool(progress.step) and row["step"] <= progress.step

    # Records of evaluations name the version of the weights, which is the number of steps done.
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
                # The last line may be whole, and lack only its newline.
                line = line + b"\n" if parsed(line) is not None else b""
            if line.strip() and keep(json.loads(line)):
                kept.write(line)
