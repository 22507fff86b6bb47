"""From the settings of a command to the plan of each part of a run: what may be read of them below this package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.algo.plan import bootstraps, has_ratios
from agentrl.algo.teacher_specs import TeachingSettings, served_teachers, teacher_specs
from agentrl.assets import VISION_MODEL, model_path
from agentrl.cluster.build import device, load_environment
from agentrl.cluster.processes import ClusterPlan
from agentrl.config.evaluate import EvaluateConfig, SampleConfig
from agentrl.config.mapping import flattened, to_json
from agentrl.config.schema import PlaySettings, TrainConfig
from agentrl.config.sections import changed, sections_of
from agentrl.core.annotations import FILE
from agentrl.core.named_args import parse_named_args
from agentrl.core.plugins import kept_environment
from agentrl.core.types import Task
from agentrl.engine.adapters import SPARE_ADAPTERS
from agentrl.engine.reward_model_facts import RewardModelSettings
from agentrl.engine.settings import Device, EngineSettings
from agentrl.env.agent_spec import AgentSpec
from agentrl.env.known_tasks import KnownTasks
from agentrl.env.plan import ANSWER
from agentrl.env.sampling import Sampling
from agentrl.env.tasks import TaskSource
from agentrl.evaluation.evaluations import EvalPlan, check_kept_kind
from agentrl.evaluation.plan import EvalConfig
from agentrl.flow.checkpoint import CONFIG
from agentrl.flow.checkpoint import read_inputs as read_manifest
from agentrl.flow.plan import BRANCH_ENTROPY, branch_entropy
from agentrl.flow.sizes import FlowPlan
from agentrl.learner.settings import LearnerSettings
from agentrl.resolve.inputs import InputPlan, Inputs, read_code, read_files, refuse_changed, shown_changes
from agentrl.rollout.episode_plan import PARTNERS, EpisodePlan, ForkSettings, StragglerPolicy
from agentrl.rollout.group_rewards import GroupRewardSettings
from agentrl.rollout.partner_specs import partner_specs
from agentrl.rollout.plan import SamplingConfig
from agentrl.rollout.tasks import check_model as check_named_model
from agentrl.rollout.tasks import eval_tasks, open_tasks
from agentrl.track.plan import RunRecord, TrackPlan, num_recorded
from agentrl.weights.plan import AdapterPlan, SenderPlan, WeightsConfig, never

P = TypeVar("P", bound=PlaySettings)


def device_of(config: PlaySettings) -> Device:
    """Return the kind of device that engines and learner compute on: this machine's, or a joined cluster's, which must have GPUs."""
    if config.run.ray_address and config.run.runtime != "local":
        return "cpu" if config.run.device == "cpu" else "cuda"
    return device(config.run.device)


def temperature_of(config: PlaySettings) -> float:
    """Return the sampling temperature of a command."""
    if isinstance(config, EvaluateConfig):
        return 1.0 if config.eval.eval_temperature is None else config.eval.eval_temperature
    sampling: SamplingConfig = getattr(config, "sampling", SamplingConfig())
    return sampling.temperature


def cluster_plan(config: PlaySettings, on: Device | None = None) -> ClusterPlan:
    """Return what the processes of a command are made of; `on` is the kind of device, if it is known."""
    on = on or device_of(config)
    plan = ClusterPlan(
        run=config.run, device=on, episodes=episode_plan(config), engine=engine_plan(config, on), judges=judge_plans(config, on)
    )
    if not isinstance(config, TrainConfig):
        return plan
    run = config.training
    several = config.run.runtime != "local" and not config.weights.colocate
    return replace(
        plan,
        learner=learner_plan(config, on),
        sender=sender_plan(config, plan.engine),
        eval_engines=run.eval_engines,
        most_workers=flow_plan(config).most_workers if several else 1,
        run_dir=run.run_dir.absolute() if run.run_dir else None,  # ranks write there, from folders of their own
    )


def episode_plan(config: PlaySettings) -> EpisodePlan:
    """Return what the episodes of a command are played by."""
    sections: dict[str, Any] = {name: getattr(config, name) for name in sections_of(EpisodePlan)}
    sections["model"] = replace(config.model, model=model_path(config.model.model))
    plan = EpisodePlan(
        **sections,
        seed=config.run.seed,
        temperature=temperature_of(config),
        max_num_seqs=config.engine.max_num_seqs,
        places=repr(config.run),
    )
    if not isinstance(config, TrainConfig):
        return plan
    run_name = str(config.training.run_dir or "")
    return replace(
        plan,
        is_training=True,
        weighs_ratios=has_ratios(config.algo),
        straggler_policy=_straggler_policy(config),
        run_name=run_name,
        places=run_name or plan.places,
        group_reward=_group_reward(config),
        partner_folder=partner_folder(config),
        forks=_forks(config),
        keeps_unread=bootstraps(config.algo),
        teaching=_teaching(config),
        hint_template=config.algo.teacher_template,
    )


def _straggler_policy(config: TrainConfig) -> StragglerPolicy | None:
    if config.flow.group_quorum == 1.0:
        return None
    least = flow_plan(config).min_members
    return StragglerPolicy(quorum=config.flow.group_quorum, least=least)


def partner_folder(config: TrainConfig) -> str:
    """Return the directory of earlier weights that agents are played by; empty if none are."""
    if config.training.run_dir is None or not any(spec.kind == "past" for spec in partner_specs(config.partner)):
        return ""
    return str(config.training.run_dir.absolute() / PARTNERS)


def _teaching(config: TrainConfig) -> TeachingSettings | None:
    algo = config.algo
    specs = served_teachers(algo.teacher)
    top_k = 1 if algo.teacher_loss == "sampled" else algo.teacher_top_k
    return TeachingSettings(specs=specs, top_k=top_k, by=algo.teacher_by, timeout_s=config.rollout.reward_timeout_s) if specs else None


def _group_reward(config: TrainConfig) -> GroupRewardSettings | None:
    flow, own, timeout_s = config.flow, config.reward.environment_reward_weight, config.rollout.reward_timeout_s
    if not flow.group_reward:
        return None
    # Beside a reward model the environment's part has been weighted already.
    replaces = own == 0 and not config.reward.reward_model
    return GroupRewardSettings(name=flow.group_reward, weight=flow.group_reward_weight, replaces=replaces, timeout_s=timeout_s)


def _forks(config: TrainConfig) -> ForkSettings | None:
    at, branches = config.flow.branch_at, config.flow.branches
    if at == "never":
        return None
    if isinstance(at, int):
        return ForkSettings(at=at, branches=branches, entropy=BRANCH_ENTROPY)
    return ForkSettings(at="entropy", branches=branches, entropy=branch_entropy(at))


def engine_plan(config: PlaySettings, on: Device) -> EngineSettings:
    """Return what engine number 0 is made of."""
    plan = EngineSettings(
        model=replace(config.model, model=model_path(config.model.model)),
        engine=config.engine,
        weights=config.weights if isinstance(config, TrainConfig) else WeightsConfig(),
        device=on,
        seed=config.run.seed,
        max_images=config.images.max_images,
    )
    if not isinstance(config, TrainConfig):
        return plan
    plan = replace(plan, routed_experts=config.algo.router_replay)
    if config.weights.publish != "adapter":
        return plan
    return replace(plan, adapters=config.flow.staleness + 1, lora_rank=config.lora.lora_rank)


def judge_plans(config: PlaySettings, on: Device) -> tuple[RewardModelSettings, ...]:
    """Return what the reward models of ``--reward-model`` are made of."""
    reward = config.reward
    judge = RewardModelSettings(
        model="",
        policy=model_path(config.model.model),
        device=on if reward.reward_model_gpus else "cpu",
        trust_remote_code=config.model.trust_remote_code,
        as_messages=config.run.agent == ANSWER,
    )
    return tuple(replace(judge, model=model) for model in reward.reward_model)


def learner_plan(config: TrainConfig, on: Device) -> LearnerSettings:
    """Return what a learner rank is made of."""
    run, engine = config.training, config.engine
    held = config.weights.publish != "adapter" and not engine.quantizes  # else engines hold other numbers than the learner
    recorded = config.record.annotate and config.record.record != "none" and run.run_dir is not None
    return LearnerSettings(
        model=model_path(config.model.model),
        learner=config.learner,
        lora=config.lora,
        weights=config.weights,
        algo=config.algo,
        num_steps=run.num_steps,
        max_new_tokens=config.rollout.max_new_tokens,
        max_model_len=engine.max_model_len,
        seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code,
        device=on,
        annotations=run.run_dir.absolute() / FILE if recorded and run.run_dir else None,
        max_mismatch=mismatch_limit(config, on),
        engine=f"{engine.name} in {engine.dtype(on)}",
        demonstrations=run.run_dir.absolute() / DEMONSTRATIONS if config.algo.sft_data and run.run_dir else None,
        audit_every=run.audit_every,
        verify_every=config.weights.verify_weights_every if held else 0,
        engine_dtype=engine.dtype(on),
    )


DEMONSTRATIONS = "demonstrations"
"""Folder of a run's directory with the rows of ``--sft-data``."""


def mismatch_limit(config: TrainConfig, on: Device) -> float | None:
    """Return the limit of ``--max-mismatch`` on a kind of device; `None` if nothing is judged, as with truncated sampling."""
    asked, truncated = config.training.max_mismatch, config.rollout.top_p < 1.0 or config.rollout.top_k > 0
    if asked in (0, "none") or truncated:  # the learner scores the whole distribution
        return None
    if not isinstance(asked, str):
        return asked
    dtypes = {config.engine.dtype(on), config.learner.dtype(on)}
    # Each of these has engine and learner compute something else on purpose.
    arguments = set(parse_named_args(config.engine.engine_args)) - {"enforce_eager"}
    apart = arguments or config.learner.load_in_4bit or config.lora.lora_dropout or config.weights.kv_on_publish == "keep"
    return 0.01 if dtypes == {"float32"} and not apart else 0.1


def sender_plan(config: TrainConfig, engine: EngineSettings) -> SenderPlan:
    """Return how the learner's weights go to the engines."""
    lora, weights, run = config.lora, config.weights, config.training
    adapter = None
    if weights.publish == "adapter":
        kept = config.flow.staleness + 1 + SPARE_ADAPTERS
        adapter = AdapterPlan(rank=lora.lora_rank, alpha=lora.lora_alpha, rslora="rslora" in lora.lora_variant, kept=kept)
    return SenderPlan(
        transport=engine.transport,
        folder=run.run_dir.absolute() / "weights" if weights.weight_transport == "disk" and run.run_dir else None,
        held=run.evaluates_after if run.eval_engines else never,
        bucket_bytes=weights.weight_bucket_mib * 2**20,
        workers=config.engine.gpus_per_engine,
        adapter=adapter,
    )


def flow_plan(config: TrainConfig) -> FlowPlan:
    """Return what the loops of a run read."""
    return FlowPlan(
        training=config.training,
        flow=config.flow,
        algo=config.algo,
        n_samples_per_prompt=config.sampling.n_samples_per_prompt,
        num_engines=config.engine.num_engines,
        max_concurrent_episodes=config.rollout.max_concurrent_episodes,
        normalizes_rewards=config.reward.normalize_reward,
        stall_timeout_s=config.run.stall_timeout_s,
    )


def eval_plan(config: TrainConfig | EvaluateConfig | SampleConfig) -> EvalPlan:
    """Return what the evaluations of a run read, or that of ``agentrl eval``, or the data set that ``agentrl sample`` makes."""
    measured = EvalConfig(eval_samples=config.sampling.n_samples_per_prompt) if isinstance(config, SampleConfig) else config.eval
    record: RunRecord = "none"
    if not isinstance(config, SampleConfig):
        record = config.measure.record if isinstance(config, EvaluateConfig) else config.record.record
    return EvalPlan(
        eval=measured,
        num_engines=config.engine.num_engines,
        max_num_seqs=config.engine.max_num_seqs,
        seed=config.run.seed,
        stall_timeout_s=config.run.stall_timeout_s,
        num_recorded=num_recorded(record, measured.eval_samples),
    )


def track_plan(config: TrainConfig) -> TrackPlan:
    """Return what a run shows and keeps."""
    return TrackPlan(
        track=config.track,
        record=config.record,
        num_steps=config.training.num_steps,
        n_samples_per_prompt=config.sampling.n_samples_per_prompt,
        max_new_tokens=config.rollout.max_new_tokens,
        max_turns=config.rollout.max_turns,
        max_episode_tokens=config.rollout.max_episode_tokens,
        max_model_len=config.engine.max_model_len,
    )


def input_plan(config: PlaySettings) -> InputPlan:
    """Return where the files are that a command reads; services and hub names have none here."""
    models = {"--model": model_path(config.model.model)}
    if isinstance(config, TrainConfig):
        models |= {f"--teacher {spec.name}".rstrip(): spec.where for spec in teacher_specs(config.algo.teacher) if spec.kind in LOADED}
    models |= {f"--reward-model {Path(model).name}": model for model in config.reward.reward_model}
    models |= {f"--partner {spec.agent}": spec.where for spec in partner_specs(config.partner) if spec.kind == "model"}
    return InputPlan(agent=config.run.agent, models=models, chat_template=config.model.chat_template)


def inputs_of_run(config: EvaluateConfig | SampleConfig, agent: AgentSpec) -> tuple[Inputs | None, str]:
    """Return what the run of ``--run`` has read, and which code changed since.

    Args:
        config: Settings of the command.
        agent: The environment, loaded.

    Returns:
        The run's inputs, `None` if the command plays other tasks than the run or there is no run; and the changed files, for people.

    Raises:
        ConfigError: If a model or template that the command reads as well is not what it was.
    """
    run = config.source.run
    found = {} if run is None else read_manifest(run)
    if run is None or not found or config.source.accept_changed_inputs:
        return None, ""
    before, saved = Inputs.from_json(found), flattened(json.loads((run / CONFIG).read_text(encoding="utf-8")))
    plan, began = input_plan(config), model_path(str(saved.get("model") or ""))
    played = {config.model.model, config.measure.baseline if isinstance(config, EvaluateConfig) else None}
    # The model that the run has trained is no input of it; the one that it began with may be the baseline.
    plan = replace(
        plan, models={**plan.models, "--model": began if began in {model_path(name) for name in played if name is not None} else ""}
    )
    same_agent = config.run.agent == kept_environment(str(saved["agent"]), run)
    now = Inputs(tasks=before.tasks, files=read_files(plan), code=read_code(config.run.agent) if same_agent else before.code)
    refuse_changed(before.files, now.files, str(run), flag="--run")
    same_tasks = same_agent and all(saved.get(name, value) == value for name, value in json.loads(to_json(config))["data"].items())
    return before if same_tasks else None, shown_changes(before, now)


LOADED = ("learner", "engine")
"""Kinds of teachers that the run loads itself."""


def environment(config: PlaySettings) -> AgentSpec:
    """Load the environment of a command; see `load_environment`."""
    sent = config.run.runtime == "ray"
    return load_environment(config.run.agent, config.engine.engine, episode_plan(config), sent=sent)


def fitting_model(config: P, agent: AgentSpec) -> P:
    """Return the settings with the bundled model that reads images if none is named and the environment shows some."""
    return changed(config, model=VISION_MODEL) if not config.model.model and agent.shows_images else config


def training_tasks(config: PlaySettings, agent: AgentSpec, known: KnownTasks | None = None, epoch: int = 0) -> TaskSource:
    """Return the tasks of a command; see `open_tasks`."""
    sampling = None
    if isinstance(config, TrainConfig) and config.flow.task_sampling != "epochs":
        flow = config.flow
        rule, _, key = flow.task_sampling.partition(":")
        sampling = Sampling(rule=rule, difficulty_key=key)
    return open_tasks(config.data, agent, seed=config.run.seed, sampling=sampling, known=known, epoch=epoch)


def evaluation_tasks(config: TrainConfig, agent: AgentSpec, before: Inputs | None = None) -> list[Task]:
    """Return the tasks that a run is evaluated on; none if it is not evaluated. A run that is resumed keeps those that it had `before`.

    Raises:
        ConfigError: If there are none or they cannot be used, or none is of the kind that ``--keep-best`` names.
    """
    if not config.training.evaluates:
        return []
    known, asked = (before.tasks, before.questions) if before else (None, None)
    tasks = eval_tasks(config.data, agent, seed=config.run.seed, known=known, asked=asked)
    check_kept_kind(tasks, config.training, config.eval.eval_by)
    return tasks


def check_model(config: PlaySettings) -> None:
    """Check that ``--model`` can be found, unless a cluster is joined, whose machines have folders of their own.

    Raises:
        ConfigError: If it cannot.
    """
    if not config.run.ray_address:
        check_named_model(config.model.model)
