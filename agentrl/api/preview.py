"""The lines of ``agentrl train --dry-run``."""

from __future__ import annotations

from agentrl.algo.estimators import estimator_facts
from agentrl.api.hub import check_hub
from agentrl.api.memory import device_sign, gpu_bytes, memory_sign, savings, with_shares
from agentrl.api.resume import choose_engine, resume_point
from agentrl.api.training import PROMPTS_CHECKED, check_all_prompts
from agentrl.cluster.build import load_environment
from agentrl.config.model_defaults import described, rate_warning
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import settings_of
from agentrl.core.settings import flag
from agentrl.evaluation.evaluations import run_eval_tasks
from agentrl.rollout.tasks import check_model, missing_labels, open_tasks
from agentrl.track.text import counted


def preview(config: TrainConfig) -> list[str]:
    """Return the lines of ``--dry-run`` for a person: settings that are not the defaults, the size of a step, and the data.

    Raises:
        ConfigError: If the environment, the tasks or the model cannot be used, or the run cannot be resumed with these settings.
    """
    check_hub(config)
    check_model(config)
    settled, engine_note = choose_engine(config)
    begin = resume_point(settled)
    agent = load_environment(config)
    tasks, questions = open_tasks(config, agent), run_eval_tasks(config, agent)
    form = TrainConfig.schema(vars(config.algo))
    loaded = config.to_load(form)
    given = [(item, getattr(getattr(loaded, item.section), item.name)) for item in settings_of(form).values()]
    implied = {("runtime", "ray"), *((("max_staleness", config.flow.staleness),) if config.flow.staleness <= 1 else ())}
    others = [
        flag(item.name) if value is True else f"{flag(item.name)} {value}" if value is not False else flag(f"no_{item.name}")
        for item, value in given
        if value != item.default and not (isinstance(value, str | int) and (item.name, value) in implied)
    ]
    check_all_prompts(config, [*tasks.first(PROMPTS_CHECKED), *questions])
    groups, samples, steps = config.flow.groups_per_step, config.sampling.n_samples_per_prompt, config.training.num_steps
    count, drawn = tasks.num_tasks, groups * steps
    greedy = ", and a greedy one beside each group" if estimator_facts(config.algo.advantage_estimator).greedy_baseline else ""
    endless = f"tasks without a known end, of which {drawn} are drawn"
    gpu = gpu_bytes(config.run.device)
    fitted = with_shares(config, gpu)
    saved, signs = savings(config, fitted), filter(None, (device_sign(config), memory_sign(fitted, gpu)))
    problem, sized, warning = missing_labels(config, agent, tasks.first(PROMPTS_CHECKED)), described(config), rate_warning(config)
    return [
        f"not the defaults: {', '.join(others)}",
        f"{groups * samples} episodes per step ({groups} groups of {samples}), {drawn * samples} in {steps} steps{greedy}",
        f"{counted(count, 'task')}, {drawn / count:.2g} epochs in {steps} steps" if count else endless,
        *([f"{counted(len(questions), 'task')} to evaluate on"] if questions else []),
        *([f"goes on after step {begin.progress.step}"] if begin.progress.step else []),
        *([sized] if sized else []),
        *([engine_note] if engine_note else []),
        *([f"to fit into the GPU: {saved}"] if saved else []),
        *(f"warning: {text}. {remedy}" for text, remedy in filter(None, (problem, warning))),
        *(f"warning: {sign.text}. {sign.remedy}" for sign in signs),
    ]
