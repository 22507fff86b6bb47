"""Output of ``agentrl profile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.track.text import Screen, number, percent

LABEL_WIDTH = 13


def show(screen: Screen, profile: Mapping[str, Any]) -> None:
    """Print a profile as `agentrl.cli.profile.make_profile` returns it."""
    for label, text in rows(profile):
        screen.line((f"{label:<{LABEL_WIDTH}}", "bold cyan"), text)
    settings = profile["sizes"]
    _table(screen, "staleness bound, which is the depth of the queue in steps", profile["staleness"], "max_staleness", settings)
    _table(screen, "groups per step", profile["groups_per_step"], "groups_per_step", settings)
    _table(screen, "groups started beyond those of a step (--oversample)", profile["oversample"], "spare_groups", settings)
    bound = profile["splits"][0]["max_staleness"]
    title = f"engines and learner ranks on {profile['devices']} devices, staleness bound {bound}"
    _table(screen, title, profile["splits"], "split", settings)
    if profile["asked"]:
        _table(screen, "as asked", [profile["asked"]], "split", settings)
    screen.line()
    best = profile["best"]
    screen.line(
        (f"{'recommended':<{LABEL_WIDTH}}", "bold cyan"),
        f"{_split(best)} with --max-staleness {best['max_staleness']}: {_rate(best)}, "
        f"{_faster(best['episodes_per_s'] / profile['itself']['episodes_per_s'])} this run as predicted; "
        f"staleness {number(best['staleness_mean'], 2)} on average",
    )
    for note in profile["notes"]:
        screen.line((f"{'note':<{LABEL_WIDTH}}", "yellow"), note)


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
        ("publication", f"{seconds(publication['seconds'])} per step, engines paused for {seconds(publication['pause_s'])}"),
        (
            "episode",
            f"{seconds(total_s)}: engine {percent(episode['engine_s'] / total_s)}, environment {percent(episode['env_s'] / total_s)}, "
            f"elsewhere {percent(episode['elsewhere_s'] / total_s)}",
        ),
        ("group", f"played for {seconds(group['played_s'])}, then {seconds(group['queued_s'])} in the queue"),
        ("driver", f"at most {us:.0f} us of CPU per group, {100 * driver:.2g}% of a step (simulated here)"),
    ]


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
    found = [
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
    return found + [("costs" if i == 0 else "", text) for i, text in enumerate(texts)]


def _table(screen: Screen, title: str, predictions: Sequence[Mapping[str, Any]], varied: str, sizes: Mapping[str, int]) -> None:
    screen.line()
    screen.line((title, "bold"))
    columns = ("", "step s#", "episodes/s#", "staleness#", "engine idle#", "learner idle#", "")
    screen.table(columns, [_cells(prediction, varied, sizes) for prediction in predictions])


def _cells(prediction: Mapping[str, Any], varied: str, sizes: Mapping[str, int]) -> list[str]:
    names = ("num_engines", "num_learners", "max_staleness", "groups_per_step", "spare_groups")
    return [
        _split(prediction) if varied == "split" else str(prediction[varied]),
        number(prediction["step_s"]),
        number(prediction["episodes_per_s"], 1),
        number(prediction["staleness_mean"], 2),
        percent(prediction["idle_generator"]),
        percent(prediction["idle_learner"]),
        "as it was" if all(prediction[name] == sizes[name] for name in names) else "",
    ]


def _split(sizes: Mapping[str, Any]) -> str:
    engines, learners = sizes["num_engines"], sizes["num_learners"]
    return f"{engines} engine{'s' * (engines > 1)}, {learners} learner rank{'s' * (learners > 1)}"


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
