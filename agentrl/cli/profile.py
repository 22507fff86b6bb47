"""``agentrl profile``: where a run's time went, how far it is from its bound, and what other sizes would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from agentrl.config.ranges import Count, CountOrZero
from agentrl.config.schema import TrainConfig
from agentrl.core.errors import ConfigError
from agentrl.flow import flow_settings
from agentrl.inspect.directory import TRAJECTORIES, RunDirectory
from agentrl.profile.prediction import (
    Prediction,
    bound_of,
    causes_of,
    driver_us_per_group,
    predict,
    recommended,
    splits_of,
    staleness_predictions,
)
from agentrl.profile.recorded import Recorded, read_recorded, time_shares
from agentrl.profile.report import show
from agentrl.track.jsonl import encode
from agentrl.track.text import Screen


@dataclass(frozen=True, kw_only=True)
class ProfileArgs:
    """Say where a run's time went, how far it is from its bound and why, and what other sizes would give."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Directory of the run; it may be going on."""
    devices: CountOrZero = 0
    """Devices to divide between engines and learner ranks. 0: as many as the run had."""
    num_engines: Count | None = None
    """Predict this number of engines as well."""
    num_learners: Count | None = None
    """The same with so many learner ranks."""
    max_staleness: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """The same with this staleness bound."""
    groups_per_step: Count | None = None
    """The same with so many groups per step."""
    oversample: float | None = None
    """The same with this share of groups started beyond those of a step."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show tracebacks."""


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: Words after ``profile``.

    Returns:
        The exit code.
    """
    args = tyro.cli(ProfileArgs, prog="agentrl profile", args=words)
    _check(args)
    run, screen = RunDirectory(args.run), Screen()
    config = run.config()
    profile = make_profile(recorded_times(run, config), config, args)
    if args.json:
        screen.console.file.write(encode(profile) + "\n")
        return 0
    show(screen, profile)
    for line in run.unreadable:
        screen.line((f"not readable: {line}", "yellow"))
    return 0


def recorded_times(run: RunDirectory, config: TrainConfig) -> Recorded:
    """Return the recorded times of a run.

    Raises:
        ConfigError: If that is too little.
    """
    return read_recorded(
        settings=flow_settings(config),
        num_engines=config.engine.num_engines,
        num_learners=config.learner.num_learners,
        max_sequences=config.engine.max_num_seqs,
        metrics=run.metrics(),
        records=run.records() if (run.path / TRAJECTORIES).is_file() else (),
    )


def make_profile(recorded: Recorded, config: TrainConfig, args: ProfileArgs) -> dict[str, Any]:
    """Everything that the command says, in JSON's own types; seconds are those of the steps that tell of the run's pace.

    Raises:
        ConfigError: If the devices are too few.
    """
    per_engine = config.engine.tensor_parallel_size
    used = recorded.num_engines * per_engine + recorded.num_learners
    devices = args.devices or used
    if devices < per_engine + 1:
        raise ConfigError("--devices", devices, f"is too few for an engine of {per_engine} and a learner rank", f"Give {per_engine + 1}.")
    itself, bound = predict(recorded), bound_of(recorded)
    depths = staleness_predictions(recorded)
    splits = splits_of(recorded, devices, devices_per_engine=per_engine, max_staleness=recommended(depths).max_staleness)
    best = staleness_predictions(recorded, num_engines=splits[0].num_engines, num_learners=splits[0].num_learners)
    groups = recorded.settings.rollout.groups_per_step
    return {
        "run": args.run,
        "steps": len(recorded.rows),
        "measured": {
            "step_s": recorded.step_s,
            "episodes_per_s": recorded.episodes_per_s,
            "staleness_mean": recorded.mean("staleness/mean"),
            "staleness_max": max(float(row.get("staleness/max", 0.0)) for row in recorded.rows),
        },
        "sizes": _sizes(recorded, devices=used),
        "time": time_shares(recorded),
        "model": _model(recorded),
        "itself": asdict(itself),
        "error": itself.step_s / recorded.step_s - 1.0,
        "bound": {
            **asdict(bound),
            "synchronous_s": bound.synchronous_s,
            "ideal_s": bound.ideal_s,
            "speedup": bound.speedup,
            "reached": bound.ideal_s / recorded.step_s,
        },
        "causes": [asdict(cause) for cause in causes_of(recorded)],
        "staleness": _table(depths),
        "groups_per_step": _table([predict(recorded, groups_per_step=size) for size in sorted({max(1, groups // 2), groups, 2 * groups})]),
        "oversample": _table([predict(recorded, oversample=share) for share in (0.0, 0.25, 0.5)]),
        "asked": _asked(recorded, args),
        "devices": devices,
        "splits": _table(splits),
        "best": asdict(recommended(best)),
        "driver_us_per_group": driver_us_per_group(recorded),
        "notes": [*recorded.notes, *_assumptions(recorded, devices, used, config)],
    }


def _table(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [asdict(prediction) for prediction in predictions]


def _sizes(recorded: Recorded, *, devices: int) -> dict[str, int]:
    settings = recorded.settings
    return {
        "devices": devices,
        "num_engines": recorded.num_engines,
        "num_learners": recorded.num_learners,
        "groups_per_step": settings.rollout.groups_per_step,
        "n_samples_per_prompt": settings.rollout.n_samples_per_prompt,
        "spare_groups": settings.spare_groups,
        "max_staleness": settings.max_staleness,
    }


def _model(recorded: Recorded) -> dict[str, float]:
    """The speeds that predictions are made with."""
    engine, learner = recorded.engine, recorded.learner
    return {
        "token_s": engine.token_s,
        "token_s_per_sequence": engine.token_s_per_sequence,
        "train_step_s": learner.step_s,
        "train_token_s": learner.token_s,
        "train_overhead_s": learner.overhead_s,
        "pass_rate": recorded.pass_rate,
        "failure_rate": recorded.failure_rate,
        "recorded_episodes": float(len(recorded.episodes)),
    }


def _check(args: ProfileArgs) -> None:
    lowest = {"num_engines": 1, "num_learners": 1, "groups_per_step": 1, "max_staleness": 0, "oversample": 0, "devices": 0}
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "is too low", f"Give {least} or more.")


def _asked(recorded: Recorded, args: ProfileArgs) -> dict[str, Any] | None:
    """The sizes that were asked for; `None` if none were."""
    wanted = (args.num_engines, args.num_learners, args.max_staleness, args.groups_per_step, args.oversample)
    if all(value is None for value in wanted):
        return None
    prediction = predict(
        recorded,
        num_engines=args.num_engines,
        num_learners=args.num_learners,
        max_staleness=args.max_staleness,
        groups_per_step=args.groups_per_step,
        oversample=args.oversample,
    )
    return asdict(prediction)


def _assumptions(recorded: Recorded, devices: int, used: int, config: TrainConfig) -> list[str]:
    notes = []
    if devices != used or recorded.num_learners > 1 or used > 2:
        notes.append("splits: training is taken to divide evenly over learner ranks, and publication to take as long as now")
    if config.engine.colocate:
        notes.append("engines and learner share devices here; the predictions are for devices of their own")
    if recorded.settings.max_staleness == 0:
        notes.append("the run took turns; what engine and learner take from each other when both work, as on shared cores, it cannot tell")
    if config.run.save_every:
        notes.append("checkpoints: their time is in the measured steps and not in the predictions")
    return notes
