"""Output of ``agentrl profile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.engine.settings import EngineSettings
from agentrl.profile.prediction import (
    Bound,
    bound_of,
    driver_us_per_group,
    predict,
    recommended,
    splits_of,
    staleness_predictions,
    time_costs,
)
from agentrl.profile.recorded import Recorded, time_shares
from agentrl.profile.simulation import Plan
from agentrl.track.text import Screen, counted, number, percent


def show(screen: Screen, profile: Mapping[str, Any]) -> None:
    """Print a profile as `make_profile` returns it."""
    for label, text in rows(profile):
        screen.labelled(label, text)
    settings = profile["sizes"]
    _table(screen, "staleness bound, which is the depth of the queue in steps", profile["staleness"], "max_staleness", settings)
    _table(screen, "groups per step", profile["groups_per_step"], "groups_per_step", settings)
    _table(screen, "share of groups started beyond those of a step (--oversample)", profile["oversample"], "oversample", settings)
    bound = profile["splits"][0]["max_staleness"]
    title = f"engines and learner ranks on {profile['devices']} devices, staleness bound {bound}"
    _table(screen, title, profile["splits"], "split", settings)
    if profile["asked"]:
        _table(screen, "as asked", [profile["asked"]], "split", settings)
    screen.line()
    best = profile["best"]
    screen.labelled(
        "recommended",
        f"{_split(best)} with --max-staleness {best['max_staleness']}: {_rate(best)}, "
        f"{_faster(best['episodes_per_s'] / profile['itself']['episodes_per_s'])} this run as predicted; "
        f"staleness {number(best['staleness_mean'], 2)} on average",
    )
    for note in profile["notes"]:
        screen.labelled("note", note, "yellow")


def rows(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of the lines before the tables; a continued one has the label ""."""
    return [*_measured(profile), *_time(profile), *_speeds(profile), *_bound(profile)]


def _measured(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    sizes, measured = profile["sizes"], profile["measured"]
    bound = sizes["max_staleness"]
    return [
        (
            "run",
            f"{_split(sizes)}, steps of {sizes['groups_per_step']} groups of {sizes['n_samples_per_prompt']} episodes, "
            + (f"staleness up to {bound}" if bound else "synchronous"),
        ),
        (
            "measured",
            f"{_rate(measured)}, over {profile['steps']} steps; staleness {number(measured['staleness_mean'], 2)} on average, "
            f"{number(measured['staleness_max'], 0)} at most",
        ),
    ]


def _time(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    time_shares, step_s = profile["time"], profile["measured"]["step_s"]
    learner, engine, episode, group = (time_shares[name] for name in ("learner", "engine", "episode", "group"))
    publication, us = time_shares["publication"], profile["driver_us_per_group"]
    driver = us * 1e-6 * profile["sizes"]["groups_per_step"] / step_s
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
        ("driver", f"at most {us:.0f} us of CPU per group, {100 * driver:.2g}% of a step (simulated here)"),
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


def _speeds(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    model = profile["model"]
    return [
        (
            "model",
            f"{seconds(model['token_s'])} per decoding step + {seconds(model['token_s_per_sequence'])} per sequence; training "
            f"{seconds(model['train_step_s'])} + {seconds(model['train_token_s'])} per sampled token and rank",
        ),
        ("", f"the run itself, simulated with it: {_rate(profile['itself'])} ({100 * profile['error']:+.0f}% time per step)"),
    ]


def _bound(profile: Mapping[str, Any]) -> list[tuple[str, str]]:
    bound = profile["bound"]
    lines = [
        (
            "bound",
            f"a step's generation takes {seconds(bound['generate_s'])}, its training {seconds(bound['train_s'])}, publication "
            f"{seconds(bound['publish_s'])}: in turns {seconds(bound['synchronous_s'])}, side by side {seconds(bound['ideal_s'])} at best, "
            f"{number(bound['speedup'], 2)} times as fast",
        ),
        (
            "",
            f"this run is at {percent(bound['reached'])} of that; engines that need not wait for the slowest group of a step take "
            f"{seconds(bound['pipelined_s'])}",
        ),
    ]
    costs = [cause for cause in profile["causes"] if cause["gain"] >= 0.01]
    texts = [f"without {cause['name']}: {seconds(cause['step_s'])} a step, {percent(cause['gain'])} faster" for cause in costs]
    return lines + [("costs" if i == 0 else "", text) for i, text in enumerate(texts)]


def _table(screen: Screen, title: str, predictions: Sequence[Mapping[str, Any]], varied: str, sizes: Mapping[str, int]) -> None:
    screen.line()
    screen.line((title, "bold"))
    columns = ("", "step s#", "episodes/s#", "staleness#", "engine idle#", "learner idle#", "")
    screen.table(columns, [_cells(prediction, varied, sizes) for prediction in predictions])


def _cells(prediction: Mapping[str, Any], varied: str, sizes: Mapping[str, int]) -> list[str]:
    names = ("num_engines", "num_learners", "max_staleness", "groups_per_step", "oversampled_groups")
    return [
        _split(prediction) if varied == "split" else f"{prediction[varied]:g}",
        number(prediction["step_s"]),
        number(prediction["episodes_per_s"], 1),
        number(prediction["staleness_mean"], 2),
        percent(prediction["idle_generator"]),
        percent(prediction["idle_learner"]),
        "as it was" if all(prediction[name] == sizes[name] for name in names) else "",
    ]


def _split(sizes: Mapping[str, Any]) -> str:
    engines, learners = sizes["num_engines"], sizes["num_learners"]
    return f"{counted(engines, 'engine')}, {counted(learners, 'learner rank')}"


def _rate(figures: Mapping[str, Any]) -> str:
    return f"{seconds(figures['step_s'])} per step, {number(figures['episodes_per_s'], 1)} episodes/s"


def _faster(ratio: float) -> str:
    return "as fast as" if abs(ratio - 1.0) < 0.02 else f"{ratio:.2f} times as fast as"


def seconds(value: float) -> str:
    """Seconds with three digits, in the unit that suits."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.2g} us" if value else "0 s"


def make_profile(
    recorded: Recorded, engine: EngineSettings, *, run: str, devices: int = 0, asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that the command says, in JSON's own types; seconds are those of the steps that tell of the run's pace.

    Args:
        recorded: The times of the run.
        engine: The engine of the run.
        run: The run as the user named it.
        devices: Devices to divide between engines and learner ranks; 0: as many as the run had.
        asked: Sizes to predict as well, as the arguments of `predict`; `None`: not set.

    Raises:
        ConfigError: If the devices are too few.
    """
    plan, per_engine = recorded.plan, engine.engine.gpus_per_engine
    used = plan.num_engines * per_engine + plan.learner.ranks
    devices, sizes = devices or used, asked or {}
    if devices < per_engine + 1:
        raise ConfigError("--devices", devices, f"is too few for an engine of {per_engine} and a learner rank", f"Give {per_engine + 1}.")
    itself, bound = predict(recorded), bound_of(recorded)
    depths = staleness_predictions(recorded)
    splits = splits_of(recorded, devices, devices_per_engine=per_engine, max_staleness=recommended(depths).max_staleness)
    best = staleness_predictions(recorded, num_engines=splits[0].num_engines, num_learners=splits[0].num_learners)
    groups = plan.settings.flow.groups_per_step
    return {
        "run": run,
        "steps": len(recorded.rows),
        "measured": {
            "step_s": recorded.step_s,
            "episodes_per_s": recorded.episodes_per_s,
            "staleness_mean": recorded.mean("staleness/mean"),
            "staleness_max": max(float(row.get("staleness/max", 0.0)) for row in recorded.rows),
        },
        "sizes": _sizes(plan, devices=used),
        "time": time_shares(recorded),
        "model": _model(recorded),
        "itself": asdict(itself),
        "error": itself.step_s / recorded.step_s - 1.0,
        "bound": _bound_reached(bound, recorded.step_s),
        "causes": list(map(asdict, time_costs(recorded))),
        "staleness": list(map(asdict, depths)),
        "groups_per_step": [asdict(predict(recorded, groups_per_step=size)) for size in sorted({max(1, groups // 2), groups, 2 * groups})],
        "oversample": [
            {"oversample": share, **asdict(predict(recorded, oversample=share))}
            for share in sorted({0.0, 0.25, 0.5, plan.settings.flow.oversample})
        ],
        "asked": asdict(predict(recorded, **sizes)) if any(value is not None for value in sizes.values()) else None,
        "devices": devices,
        "splits": list(map(asdict, splits)),
        "best": asdict(recommended(best)),
        "driver_us_per_group": driver_us_per_group(recorded),
        "notes": [*recorded.notes, *_saved(recorded), *_assumptions(recorded, devices, used, colocates=engine.weights.colocate)],
    }


def _bound_reached(bound: Bound, step_s: float) -> dict[str, float]:
    derived = {"synchronous_s": bound.synchronous_s, "ideal_s": bound.ideal_s, "speedup": bound.speedup}
    return {**asdict(bound), **derived, "reached": bound.ideal_s / step_s}


def _sizes(plan: Plan, *, devices: int) -> dict[str, int]:
    return {
        "devices": devices,
        "num_engines": plan.num_engines,
        "num_learners": plan.learner.ranks,
        "groups_per_step": plan.settings.flow.groups_per_step,
        "n_samples_per_prompt": plan.settings.n_samples_per_prompt,
        "oversampled_groups": plan.settings.oversampled_groups,
        "max_staleness": plan.settings.max_staleness,
    }


def _model(recorded: Recorded) -> dict[str, float]:
    """The speeds that predictions are made with."""
    engine, learner = recorded.plan.engine, recorded.plan.learner
    return {
        "token_s": engine.token_s,
        "token_s_per_sequence": engine.token_s_per_sequence,
        "train_step_s": learner.step_s,
        "train_token_s": learner.token_s,
        "train_overhead_s": learner.overhead_s,
        "pass_rate": recorded.plan.pass_rate,
        "failure_rate": recorded.plan.failure_rate,
        "recorded_episodes": float(len(recorded.episodes)),
    }


def _saved(recorded: Recorded) -> list[str]:
    """Return a line about the tokens that prefix trees saved the learner; none if they saved none."""
    saved, share = recorded.mean("tokens/saved"), recorded.mean("shared_prompts")
    if not saved:
        return []
    return [f"training: rows that begin alike saved the learner {saved:,.0f} tokens a step, {share:.0%} of all tokens of its rows"]


def _assumptions(recorded: Recorded, devices: int, used: int, *, colocates: bool) -> list[str]:
    notes = []
    if devices != used or recorded.plan.learner.ranks > 1 or used > 2:
        notes.append("splits: training is taken to divide evenly over learner ranks, and publication to take as long as now")
    if colocates:
        notes.append("engines and learner share devices here; the predictions are for devices of their own")
    if recorded.plan.settings.max_staleness == 0:
        notes.append("the run took turns; what engine and learner take from each other when both work, as on shared cores, it cannot tell")
    if recorded.plan.settings.training.save_every:
        notes.append("checkpoints: their time is in the measured steps and not in the predictions")
    return notes
