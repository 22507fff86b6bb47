"""Rules that a configuration must obey; checked before anything heavy is imported."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from agentrl.config.algorithm_rules import ALGORITHM_RULES
from agentrl.config.data_rules import check_chat_template, check_files, check_probabilities, check_template
from agentrl.config.endpoint_rules import ENDPOINT_RULES
from agentrl.config.engine_rules import ENGINE_RULES, WEIGHTS_RULES
from agentrl.config.evaluate import EvaluateConfig, SampleConfig
from agentrl.config.flow_rules import check_flow
from agentrl.config.learner_rules import check_learner, check_lora
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.core import sandboxes
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.errors import ConfigError
from agentrl.core.operating_system import require_linux
from agentrl.core.paths import absolute_names
from agentrl.core.redaction import HIDDEN
from agentrl.core.remote import check_address
from agentrl.core.settings import refuse_set
from agentrl.engine.reward_model_facts import reward_model_facts
from agentrl.env.plan import ANSWER
from agentrl.rollout.partner_specs import partner_specs
from agentrl.rollout.plan import RewardConfig
from agentrl.suites.registry import scheme_of
from agentrl.suites.scheme import JUDGE, REWARD


def prompts_exist(config: PlaySettings) -> None:
    """Files that are named are there."""
    check_files("--prompts", config.data.prompt_sources)
    check_files("--eval-prompts", config.data.eval_sources)


def probabilities_fit(config: PlaySettings) -> None:
    """Each data set has one positive number."""
    check_probabilities("--prompt-probs", config.data.prompt_probs, "--prompts", config.data.prompt_sources)


def template_has_one_place(config: PlaySettings) -> None:
    """The prompt has exactly one place in the template."""
    template = config.data.input_template
    if not template:
        return
    if not config.data.prompt_sources and not config.data.eval_sources:
        raise ConfigError("--input-template", template, "has no effect without a data set", "Give --prompts, or leave it out.")
    check_template("--input-template", template)


def chat_template_can_be_read(config: PlaySettings) -> None:
    """The file of the chat template is there, and its variables are an object."""
    check_chat_template(config.model.chat_template, config.model.chat_template_kwargs)


DATA_RULES: tuple[Callable[[PlaySettings], None], ...] = (
    prompts_exist,
    probabilities_fit,
    template_has_one_place,
    chat_template_can_be_read,
)


MEASURES = re.compile(r"eval/(reward|score|pass@([1-9]\d*))(/.+)?")


def _best_is_measured(config: TrainConfig) -> None:
    name, samples = config.training.keep_best, config.eval.eval_samples
    if not name:
        return
    if not config.training.eval_every:
        raise ConfigError("--keep-best", name, "is measured by evaluations, and there are none", "Add --eval-every N.")
    measure = MEASURES.fullmatch(name)
    if measure is None:
        raise ConfigError("--keep-best", name, "is no figure of an evaluation", "Use eval/score, eval/reward or eval/pass@1.")
    if measure[2] and int(measure[2]) > samples:
        raise ConfigError("--keep-best", name, f"needs more episodes per task than {samples}", f"Give --eval-samples {measure[2]}.")


def _eval_flags_have_an_evaluation(config: TrainConfig) -> None:
    if config.training.eval_every or config.training.eval_at_start:
        return
    refuse_set(config.eval, (), "has no effect without evaluations", "Add --eval-every N.")


def _eval_engines_have_evaluations(config: TrainConfig) -> None:
    engines = config.training.eval_engines
    if not engines:
        return
    if not config.training.eval_every:
        raise ConfigError("--eval-engines", engines, "has no effect without evaluations between steps", "Add --eval-every N.")
    if config.weights.colocate:
        problem = "gives engines GPUs of their own, and with --colocate every GPU is that of a learner rank"
        raise ConfigError("--eval-engines", engines, problem, "Leave out one of the two.")


EVAL_RULES: tuple[Callable[[TrainConfig], None], ...] = (_best_is_measured, _eval_flags_have_an_evaluation, _eval_engines_have_evaluations)


def _limits_have_processes(config: PlaySettings) -> None:
    if config.isolation.env_isolation != "none":
        return
    refuse_set(config.isolation, (), "has no effect on environments in the rollout worker", "Add --env-isolation process.")


def _processes_can_be_held(config: PlaySettings) -> None:
    if config.isolation.env_isolation == "process":
        require_linux("--env-isolation", "process", "Leave it out, or use a container.")


def _passed_are_names(config: PlaySettings) -> None:
    for name in config.isolation.env_pass:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError("--env-pass", name, "is not the name of an environment variable", "Give names only, not values.")


def _copies_have_checkpoints(config: TrainConfig) -> None:
    address = config.training.checkpoint_upload
    if not address:
        return
    if not config.training.save_every:
        raise ConfigError("--checkpoint-upload", address, "has nothing to copy without checkpoints", "Give --save-every N.")
    check_address("--checkpoint-upload", address)


def _sandboxes_can_be_held(config: PlaySettings) -> None:
    chosen = config.sandbox
    if chosen.sandbox == "none":
        refuse_set(chosen, ("sandbox_read",), "has no effect without a wall", "Leave out --sandbox none.")
    if chosen.sandbox in ("local", "none"):
        refuse_set(chosen, ("sandbox_image",), "has no effect without containers", "Add --sandbox container.")
    _remote_sandboxes_can_be_reached(config)
    agent = config.run.agent
    run_by_agent = scheme_of(agent).programs(agent)
    kind = "container" if run_by_agent is not None and run_by_agent.needs_container else chosen.sandbox
    has_wall = run_by_agent is not None and run_by_agent.calls_model and kind != "none"
    is_https = bool(config.endpoint.endpoint_certificate) or config.endpoint.endpoint_url.startswith("https:")
    if has_wall and is_https and chosen.sandbox_network == "endpoint":
        problem = "gives programs the endpoint under an address of loopback, which no certificate is for"
        raise ConfigError("--sandbox-network", "endpoint", problem, "Choose --sandbox-network all, or an endpoint without HTTPS.")
    is_needed = kind in sandboxes.HOLDERS and run_by_agent is not None and not config.run.ray_address
    if is_needed and not sandboxes.has_holder(kind):
        programs, remedy = sandboxes.HOLDERS[kind]
        problem = f"{config.run.agent} runs programs, and there is no {' or '.join(programs)}"
        raise ConfigError("--sandbox", chosen.sandbox, problem, remedy)
    for path in chosen.sandbox_read:
        if not Path(path).is_absolute():
            raise ConfigError("--sandbox-read", path, "is no absolute path", f"Write {Path(path).absolute()}.")


def _remote_sandboxes_can_be_reached(config: PlaySettings) -> None:
    chosen = config.sandbox
    if chosen.sandbox != "remote":
        refuse_set(chosen, ("sandbox_url",), "has no effect on sandboxes of this machine", "Add --sandbox remote.")
        return
    if not chosen.sandbox_url.startswith(("http://", "https://")):
        problem = "is no address of a server" if chosen.sandbox_url else "is missing"
        raise ConfigError("--sandbox-url", chosen.sandbox_url, problem, "Write the http://HOST:PORT that agentrl serve-sandboxes printed.")
    if not os.environ.get(sandboxes.KEY):
        raise ConfigError(sandboxes.KEY, "", "is not set, and the server asks for it", "Set the key that agentrl serve-sandboxes printed.")
    refuse_set(chosen, ("sandbox_read",), "names files of this machine, and the sandboxes are elsewhere", "Leave it out.")
    if scheme_of(config.run.agent).programs(config.run.agent) is not None:
        problem = f"{config.run.agent} works in a folder of this machine"
        raise ConfigError("--sandbox", "remote", problem, "Choose --sandbox local or container.")


ISOLATION_RULES: tuple[Callable[[PlaySettings], None], ...] = (
    _limits_have_processes,
    _processes_can_be_held,
    _passed_are_names,
    _sandboxes_can_be_held,
)


def judged_agent(config: PlaySettings) -> str:
    """Return the agent, or what ``--remote-rm-url`` or ``--reward-model`` stands for.

    Raises:
        ConfigError: If ``--agent`` names another judge.
    """
    urls, given = config.data.remote_rm_url, config.run.agent
    if judged_by_models(config):
        return ANSWER
    if not urls:
        return given
    if scheme_of(given).takes_reward:
        return _judged_program(given, urls)
    if urls.endswith(".py"):
        agent = urls
    else:
        # A run of an earlier version, whose batches could be set, has the size in the name of its environment.
        agent = f"reward:{','.join(url.strip() for url in urls.split(','))}#timeout_s={config.rollout.reward_timeout_s:g}&batch_size=64"
    # A saved address that lacks its credentials contradicts nothing: the one that is given now takes its place.
    if given and HIDDEN not in given and given.partition("#")[0] != agent.partition("#")[0]:
        raise ConfigError("--remote-rm-url", urls, f"--agent {given} says already what judges", "Leave out one of the two.")
    return agent


def _judged_program(given: str, file: str) -> str:
    """A program with the reward function that judges what it prints."""
    reward = f"{REWARD}{absolute_names(file)}"
    if JUDGE in given or (REWARD in given and reward not in given):
        raise ConfigError("--reward", file, f"--agent {given} says already what judges", "Leave out one of the two.")
    if not file.endswith(".py"):
        raise ConfigError("--reward", file, "is no Python file, and a program is judged by a function", "Write --reward file.py.")
    return given if reward in given else f"{given}{reward}"


def _scheme_accepts(config: PlaySettings) -> None:
    scheme_of(config.run.agent).check(config.run.agent)


def judged_by_models(config: PlaySettings) -> bool:
    """Return True if answers to ``--prompts`` are judged by reward models alone."""
    return bool(config.reward.reward_model) and config.run.agent in ("", ANSWER) and not config.data.remote_rm_url


def _reward_models_can_judge(config: PlaySettings) -> None:
    reward = config.reward
    if not reward.reward_model:
        if isinstance(config, TrainConfig) and config.flow.group_reward:
            reward = replace(reward, environment_reward_weight=RewardConfig.environment_reward_weight)
        refuse_set(reward, (), "has no effect without a reward model", "Add --reward-model, or leave it out.")
        return
    if len(reward.weights) != len(reward.reward_model) or not all(map(math.isfinite, reward.weights)):
        problem = f"must hold one number for each of the {len(reward.reward_model)} models"
        raise ConfigError("--reward-model-weights", reward.reward_model_weights, problem, "Give as many numbers as models.")
    if config.run.agent == ANSWER and not (config.data.prompts or config.data.eval_prompts):
        raise ConfigError("--prompts", "", "is not given, and a reward model has no tasks", "Name a data set, or an environment.")
    if reward.environment_reward_weight != RewardConfig.environment_reward_weight and config.penalty.changes_rewards:
        problem = "does not go with penalties for length (--overlong-buffer, --stop-properly-penalty), which it would scale as well"
        raise ConfigError("--environment-reward-weight", reward.environment_reward_weight, problem, "Leave out one of the two.")
    for model in reward.reward_model:
        reward_model_facts(model)


def _partners_can_play(config: PlaySettings) -> None:
    partner_specs(config.partner)


def _reward_servers_can_be_asked(config: PlaySettings) -> None:
    urls, limit = config.data.remote_rm_url, config.rollout.step_timeout_s
    if not urls or urls.endswith(".py"):
        return
    if not all(url.strip().startswith(("http://", "https://")) for url in urls.split(",")):
        problem = "is neither a Python file nor a list of addresses"
        raise ConfigError("--remote-rm-url", urls, problem, "Write http://HOST:PORT/PATH, with commas between several.")
    if not config.data.prompts:
        raise ConfigError("--prompts", "", "is not given, and a reward server has no tasks", "Name a data set.")
    if config.rollout.reward_timeout_s >= limit:
        problem = f"is not below --step-timeout-s {limit:g}, which would end the request first"
        raise ConfigError("--reward-timeout-s", config.rollout.reward_timeout_s, problem, "Lower it, or raise the other.")


def _agent_is_named(config: PlaySettings) -> None:
    if not config.run.agent:
        raise ConfigError("--agent", "", "no environment is named", "Give one, for example --agent envs/calculator.py.")
    path = config.run.agent.partition(":")[0]
    if path.endswith(".py") and not Path(path).is_file():
        raise ConfigError("--agent", config.run.agent, "no such file", f"Looked for {Path(path).absolute()}.")


def _model_exists(config: PlaySettings) -> None:
    name = config.model.model
    if not name:
        return
    path = Path(name).expanduser()
    # The name of a model on the hub has one slash at most.
    looks_local = name.startswith(("/", "./", "../", "~")) or path.exists() or name.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        if holds_adapter(path):
            remedy = f"Write the whole model with agentrl export {path.parent} --merge OUT, and name OUT."
            raise ConfigError("--model", name, "holds an adapter without its model", remedy)
        problem = "the directory holds no config.json" if path.is_dir() else "no such directory"
        raise ConfigError("--model", name, problem, "Give a Hugging Face model directory or a hub name like `org/name`.")


def _a_group_may_begin(config: PlaySettings) -> None:
    limit = config.rollout.max_concurrent_episodes
    if isinstance(config, EvaluateConfig):
        n = config.eval.eval_samples
        problem = f"is less than --eval-samples {n}, and the episodes of a task begin together"
    elif isinstance(config, TrainConfig | SampleConfig):
        n = config.sampling.n_samples_per_prompt
        problem = f"is less than a group of --n-samples-per-prompt {n}, and a group begins as a whole"
    else:
        return
    if 0 < limit < n:
        raise ConfigError("--max-concurrent-episodes", limit, problem, f"Use at least {n}, or 0.")


def _requests_have_episodes(config: TrainConfig) -> None:
    if config.endpoint.record_requests and config.record.record == "none":
        problem = "has no effect with --record none, because no episode is recorded"
        raise ConfigError("--record-requests", "on", problem, "Give another --record, or leave it out.")


def _model_can_be_uploaded(config: TrainConfig) -> None:
    if config.record.push_to_hub and (config.record.push_to_hub.count("/") != 1 or not config.record.save_model):
        problem = "is not ORGANISATION/NAME" if config.record.save_model else "needs the model, which --no-save-model leaves out"
        raise ConfigError("--push-to-hub", config.record.push_to_hub, problem, "Write for example --push-to-hub me/my-model.")


def _endpoint_can_be_reached(config: PlaySettings) -> None:
    for rule in ENDPOINT_RULES:
        rule(config.endpoint)


def _groups_flow(config: TrainConfig) -> None:
    samples, turns = config.sampling.n_samples_per_prompt, config.rollout.max_turns
    check_flow(config.flow, samples=samples, turns=turns, has_partners=bool(config.partner.partner))


PLAY_RULES: tuple[Callable[[PlaySettings], None], ...] = (
    _agent_is_named,
    _scheme_accepts,
    _reward_servers_can_be_asked,
    _reward_models_can_judge,
    _partners_can_play,
    *DATA_RULES,
    _model_exists,
    *ENGINE_RULES,
    _a_group_may_begin,
    *ISOLATION_RULES,
    _endpoint_can_be_reached,
)

RULES: tuple[Callable[[TrainConfig], None], ...] = (
    *PLAY_RULES,
    *ALGORITHM_RULES,
    _groups_flow,
    *WEIGHTS_RULES,
    check_lora,
    check_learner,
    _requests_have_episodes,
    _model_can_be_uploaded,
    *EVAL_RULES,
    _copies_have_checkpoints,
)


def penalties_of_the_run_fit(config: PlaySettings) -> None:
    """Refuse a turn that is shorter than the buffer before it of the run that settings are taken from."""
    budget, buffer = config.rollout.max_new_tokens, config.penalty.overlong_buffer
    if budget < buffer:
        raise ConfigError("--max-new-tokens", budget, f"is less than the run's --overlong-buffer {buffer}", f"Use at least {buffer}.")
