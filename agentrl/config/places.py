"""Settings that name files and directories, made absolute."""

from __future__ import annotations

from typing import TypeVar

from agentrl.algo.teacher_specs import with_absolute_folders
from agentrl.config.evaluate import EvaluateConfig
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed
from agentrl.core.paths import absolute_names

P = TypeVar("P", bound=PlaySettings)


def with_absolute_paths(config: P) -> P:
    """Return the settings with absolute paths of what is read, so that every process finds it, also after user code went elsewhere."""
    config = changed(
        config,
        agent=absolute_names(config.run.agent),
        model=absolute_names(config.model.model),
        prompts=absolute_names(config.data.prompts),
        eval_prompts=absolute_names(config.data.eval_prompts),
        reward_model=tuple(map(absolute_names, config.reward.reward_model)),
    )
    if isinstance(config, TrainConfig) and config.algo.teacher:
        template = config.algo.teacher_template
        config = changed(config, teacher=with_absolute_folders(config.algo.teacher), teacher_template=absolute_names(template))
    if isinstance(config, TrainConfig) and config.algo.sft_data:
        sources, *options = config.algo.sft_data.split("#", 1)
        config = changed(config, sft_data="#".join([absolute_names(sources), *options]))
    if isinstance(config, EvaluateConfig) and config.measure.baseline:
        return changed(config, baseline=absolute_names(config.measure.baseline))
    return config
