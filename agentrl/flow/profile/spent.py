"""Where a recorded run's time went: for the learner, an engine, an episode and a group."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.flow.profile.recorded import Recorded


def spent(recorded: Recorded) -> Mapping[str, Mapping[str, float]]:
    """Parts of a step's time, by who spends it; what a run did not record is left out.

    Returns:
        ``learner``, seconds per step: training, handing groups over, exporting, and waiting, which is the rest. ``publication``,
        seconds per step. ``engine``, shares of the time: decoding, paused, idle. ``episode``, mean seconds: in the engine, in the
        environment, and elsewhere. ``group``, mean seconds: being played, and waiting in the queue for its step.
    """
    step_s = recorded.step_s
    train_s = recorded.mean("time/train_s")
    handing_s = max(0.0, recorded.mean("time/learner_s", train_s) - train_s)
    export_s, publish_s = recorded.mean("publish/export_s"), recorded.mean("publish/seconds")
    idle, paused = recorded.mean("idle/generator"), min(1.0, recorded.mean("publish/pause_s") / step_s)
    total_s, generate_s, env_s = (recorded.mean(f"episode/{name}") for name in ("total_s", "generate_s", "env_s"))
    return {
        "learner": {
            "train_s": train_s,
            "handing_over_s": handing_s,
            "export_s": export_s,
            "waiting_s": max(0.0, step_s - train_s - handing_s - export_s),
        },
        "publication": {"seconds": publish_s, "pause_s": recorded.mean("publish/pause_s")},
        "engine": {"decoding": 1.0 - idle, "paused": min(paused, idle), "idle": max(0.0, idle - paused)},
        "episode": {"engine_s": generate_s, "env_s": env_s, "elsewhere_s": max(0.0, total_s - generate_s - env_s)},
        "group": {"played_s": recorded.mean("group/seconds_mean"), "queued_s": recorded.mean("queue/wait_s")},
    }
