"""Output of ``agentrl profile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agentrl.engine.settings import EngineSettings
from agentrl.profile.recorded import Bound, Recorded, bound_of, time_shares
from agentrl.track.text import Screen, counted, number, percent

LONGER = 1.25
"""Times as long as the other side that generation or training has to take to be called what a run waits for."""


def show(screen: Screen, profile: Mapping[str, Any]) -> None:
    """Print a profile as `make_profile` returns it."""
    for label, text in rows(profile):
        screen.labelled(label, text)
    for note in profile["notes"]:
        screen.labelled("note", note, "yellow")


def rows(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of the lines; a continued one has the label ""."""
    return [*_measured(profile), *_time(profile), *_bound(profile["bound"])]


def _measured(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    sizes, measured = profile["sizes"], profile["measured"]
    bound = sizes["max_staleness"]
    return [
        (
            "run",
            f"{counted(sizes['num_engines'], 'engine')}, {counted(sizes['num_learners'], 'learner rank')}, steps of "
            f"{sizes['groups_per_step']} groups of {sizes['n_samples_per_prompt']} episodes, "
            + (f"staleness up to {bound}" if bound else "synchronous"),
        ),
        (
            "measured",
            f"{seconds(measured['step_s'])} per step, {number(measured['episodes_per_s'], 1)} episodes/s, over {profile['steps']} steps; "
            f"staleness {number(measured['staleness_mean'], 2)} on average, {number(measured['staleness_max'], 0)} at most",
        ),
    ]


def _time(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    time_shares, step_s = profile["time"], profile["measured"]["step_s"]
    learner, engine, episode, group = (time_shares[name] for name in ("learner", "engine", "episode", "group"))
    publication = time_shares["publication"]
    names = {"train_s": "training", "handing_over_s": "handing groups over", "export_s": "exporting", "waiting_s": "waiting for groups"}
    parts = ", ".join(f"{name} {seconds(learner[key])} ({percent(learner[key] / step_s)})" for key, name in names.items())
    total_s = sum(episode.values()) or float("nan")
    return [
        ("learner", f"of a step: {parts}"),
        ("engine", f"decoding {percent(engine['decoding'])}, paused {percent(engine['paused'])}, idle {percent(engine['idle'])}"),
        *_evaluations(time_shares["evaluation"]),
        ("publication", f"{seconds(publication['seconds'])} per step, engines paused for {seconds(publication['pause_s'])}"),
        (
            "episode",
            f"{seconds(total_s)}: engine {percent(episode['engine_s'] / total_s)}, environment {percent(episode['env_s'] / total_s)}, "
            f"elsewhere {percent(episode['elsewhere_s'] / total_s)}",
        ),
        ("group", f"played for {seconds(group['played_s'])}, then {seconds(group['queued_s'])} in the queue"),
    ]


def _evaluations(times: Mapping[str, float]) -> list[tuple[str, str]]:
    if not times:
        return []
    text = (
        f"{seconds(times['seconds'])} each, for {seconds(times['wait_s'])} of which the learner waited; {times['count']:.0f} between steps"
    )
    if "engines" in times:
        text += f"; {counted(int(times['engines']), 'engine')} of their own, used for {times['used']:.0%} of the time"
    return [("evaluations", text)]


def _bound(bound: Mapping[str, float]) -> list[tuple[str, str]]:
    lines = [
        (
            "bound",
            f"a step's generation takes {seconds(bound['generate_s'])}, its training {seconds(bound['train_s'])}, publication "
            f"{seconds(bound['publish_s'])}: side by side {seconds(bound['ideal_s'])} at best, of which this run is at "
            f"{percent(bound['reached'])}",
        )
    ]
    if bound["generate_s"] > LONGER * bound["train_s"]:
        lines.append(("", "generation is the longer side: more engines (--num-engines) or shorter answers make it shorter"))
    elif bound["train_s"] > LONGER * bound["generate_s"]:
        lines.append(("", "training is the longer side: more learner ranks (--num-learners) make it shorter"))
    return lines


def seconds(value: float) -> str:
    """Seconds with three digits, in the unit that suits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.2g} us" if value else "0 s"


def make_profile(recorded: Recorded, engine: EngineSettings, *, run: str) -> dict[str, Any]:
    """Everything that the command says, in JSON's own types; seconds are those of the steps that tell of the run's pace.

    Args:
        recorded: The times of the run.
        engine: The engine of the run.
        run: The run as the user named it.
    """
    settings, bound = recorded.settings, bound_of(recorded)
    return {
        "run": run,
        "steps": len(recorded.rows),
        "measured": {
            "step_s": recorded.step_s,
            "episodes_per_s": recorded.episodes_per_s,
            "staleness_mean": recorded.mean("staleness/mean"),
            "staleness_max": max(float(row.get("staleness/max", 0.0)) for row in recorded.rows),
        },
        "sizes": {
            "num_engines": settings.num_engines,
            "num_learners": recorded.num_learners,
            "groups_per_step": settings.flow.groups_per_step,
            "n_samples_per_prompt": settings.n_samples_per_prompt,
            "oversampled_groups": settings.oversampled_groups,
            "max_staleness": settings.max_staleness,
        },
        "time": time_shares(recorded),
        "bound": {
            **asdict(bound),
            "synchronous_s": bound.synchronous_s,
            "ideal_s": bound.ideal_s,
            "reached": bound.ideal_s / recorded.step_s,
        },
        "notes": [*_saved(recorded), *_overlap(recorded, bound, shared=engine.weights.colocate)],
    }


def _saved(recorded: Recorded) -> list[str]:
    """Return a line about the tokens that prefix trees saved the learner; none if they saved none."""
    saved, share = recorded.mean("tokens/saved"), recorded.mean("shared_prompts")
    if not saved:
        return []
    return [f"training: rows that begin alike saved the learner {saved:,.0f} tokens a step, {share:.0%} of all tokens of its rows"]


def _overlap(recorded: Recorded, bound: Bound, *, shared: bool) -> list[str]:
    """Return a line about what --async would hide of a synchronous run."""
    if recorded.settings.max_staleness:
        return []
    if shared:
        return ["engines and learner take turns on the devices that they share, so nothing of a step can be hidden"]
    hidden = min(bound.generate_s, bound.train_s)
    return [f"--async hides at most {seconds(hidden)} of a step, less where both compute on the same cores"]
