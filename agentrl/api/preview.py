"""The lines of ``agentrl train --dry-run``."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.algo.estimators import estimator_facts
from agentrl.api.hub import check_hub
from agentrl.api.training import PROMPTS_CHECKED, check_all_prompts
from agentrl.config.model_defaults import described, rate_warning
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.resolve.memory import device_sign, gpu_bytes, memory_sign
from agentrl.resolve.parts import check_model
from agentrl.resolve.plan import RunPlan
from agentrl.resolve.saved import resume_point
from agentrl.resolve.steps import GIVEN
from agentrl.rollout.tasks import missing_labels
from agentrl.track.text import counted


def preview(plan: RunPlan) -> list[str]:
    """Return the lines of ``--dry-run`` for a person: settings that are not the defaults, the size of a step, and the data.

    Raises:
        ConfigError: If the tasks or the model cannot be used, or the run cannot be resumed with these settings.
    """
    config, agent = plan.settings, plan.agent
    check_hub(config.record.push_to_hub)
    check_model(config)
    begin = resume_point(config)
    tasks, questions = plan.tasks()
    check_all_prompts(plan.cluster, [*tasks.first(PROMPTS_CHECKED), *questions])
    groups, samples, steps = config.flow.groups_per_step, config.sampling.n_samples_per_prompt, config.training.num_steps
    count, drawn = tasks.num_tasks, groups * steps
    greedy = ", and a greedy one beside each group" if estimator_facts(config.algo.advantage_estimator).greedy_baseline else ""
    endless = f"tasks without a known end, of which {drawn} are drawn"
    signs = filter(None, (device_sign(config), memory_sign(config, gpu_bytes(config.run.device))))
    problem, sized, warning = missing_labels(config.data, agent, tasks.first(PROMPTS_CHECKED)), described(config), rate_warning(config)
    return [
        f"not the defaults: {', '.join(_others(plan))}",
        f"{groups * samples} episodes per step ({groups} groups of {samples}), {drawn * samples} in {counted(steps, 'step')}{greedy}",
        f"{counted(count, 'task')}, {drawn / count:.2g} epochs in {counted(steps, 'step')}" if count else endless,
        *([f"{counted(len(questions), 'task')} to evaluate on"] if questions else []),
        *([f"goes on after step {begin.progress.step}"] if begin.progress.step else []),
        *([sized] if sized else []),
        *plan.notes,
        *(["known once the cluster is joined: --device, --rollout-workers-per-engine"] if config.run.ray_address else []),
        *(f"warning: {text}. {remedy}" for text, remedy in filter(None, (problem, warning))),
        *(f"warning: {sign.text}. {sign.remedy}" for sign in signs),
    ]


def _others(plan: RunPlan) -> Iterator[str]:
    """Yield the settings that are not the defaults, and what decided those that nobody gave."""
    form = TrainConfig.schema(vars(plan.settings.algo))
    loaded = plan.settings.to_load(form)
    for item in settings_of(form).values():
        value, source = getattr(getattr(loaded, item.section), item.name), plan.sources.get(item.name, "")
        if value == item.default or source == "settings":
            continue
        words = flag(f"no_{item.name}") if value is False else flag(item.name) if value is True else f"{flag(item.name)} {value}"
        yield words if source in ("", *GIVEN) else f"{words} ({source})"
