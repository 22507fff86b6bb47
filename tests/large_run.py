"""A run with as many episodes as asked for, made from one, in the files that a training writes."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.track.index import scan_records, write_index
from tests.run_files import MadeRun, annotation_of, read

GROUPS_PER_STEP, MEMBERS = 16, 8
TURNS, TOKENS = 4, 200


def large_run(folder: Path, *, size: int = 0, episodes: int = 0) -> Path:
    """A run whose file of trajectories has a size, or with so many episodes of 800 sampled tokens, all of them with annotations."""
    made = MadeRun(folder, num_steps=100_000)
    made.group(1, members=1, turns=TURNS, tokens=TOKENS)
    made.close()
    [record] = read(folder / "trajectories.jsonl")
    template, [judged] = json.dumps(record), read(folder / "groups.jsonl")
    note = annotation_of(record, 1).line()
    steps = max(1, (episodes or size // len(template)) // (GROUPS_PER_STEP * MEMBERS))
    with (
        (folder / "trajectories.jsonl").open("w") as records,
        (folder / "annotations.jsonl").open("w") as notes,
        (folder / "groups.jsonl").open("w") as groups,
        (folder / "steps.jsonl").open("w") as lines,
        (folder / "metrics.jsonl").open("w") as metrics,
    ):
        for step in range(1, steps + 1):
            numbers = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
            for group in numbers:
                names = [f"{group}-0-{member}" for member in range(MEMBERS)]
                for name in names:
                    own = template.replace('"0-0-0"', f'"{name}"').replace('"group_id": 0', f'"group_id": {group}')
                    records.write(own.replace('"version": 0', f'"version": {step - 1}') + "\n")
                    notes.write(note.replace('"0-0-0"', f'"{name}"').replace('"step": 1', f'"step": {step}') + "\n")
                about = {"group_id": group, "task_id": f"task-{group % 500}", "version": step - 1, "episodes": names}
                about |= {"rewards": [1.0, 0.0] * (MEMBERS // 2), "scores": [1.0, 0.0] * (MEMBERS // 2)}
                groups.write(json.dumps({**judged, **about, "ended_s": judged["ended_s"] + group}) + "\n")
            begin_s = judged["ended_s"] + numbers[0]
            lines.write(json.dumps({"step": step, "groups": list(numbers), "begin_s": begin_s, "trained_s": begin_s + 16}) + "\n")
            metrics.write(json.dumps({"step": step, "reward/mean": 0.5, **{f"metric/{place}": step / 7 for place in range(100)}}) + "\n")
    write_index(folder / "trajectories.jsonl", scan_records(folder / "trajectories.jsonl"))
    return folder
