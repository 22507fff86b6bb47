"""Every setting, with its default and what it means. Frozen; resolved once; nothing changes it during a run.

The docstring under each field is what ``agentrl train --help all`` and ``docs/configuration.md`` show. Field names are
unique over all sections, so a flag needs no prefix: ``--learning-rate`` is `LearnerConfig.learning_rate`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt, Le

from agentrl.config.algorithm import AlgoConfig
from agentrl.config.data_rules import listed
from agentrl.config.engine_args import workers_per_engine
from agentrl.config.learner import LearnerConfig
from agentrl.config.lora import LoraConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.sections import Count, CountOrZero, Fraction, NonNegative, Positive, Record, Temperature, TemperatureOrZero


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The environment, the length of the run, and the place of its results."""

    agent: str = ""
    """Environment or reward to train on: ``file.py``, ``file.py:Name``, ``package.module:Name``, ``gym:ID``; or ``--remote-rm-url``."""
    check_env: bool = True
    """Play one scripted episode before anything heavy starts, and end the run if the environment breaks its contract there. Skipped
    with ``--resume``, ``--ray-address`` and ``--env-isolation process``."""
    num_steps: Count = 50
    """Optimizer steps to train for."""
    seed: CountOrZero = 0
    """Seed of the whole run: order of tasks, sampling, initialisation of new layers."""
    run_dir: Path | None = None
    """Where everything of this run is written. Default: ``runs/<environment>-<date>-<time>``."""
    save_every: CountOrZero = 0
    """Steps between two checkpoints, from which ``--resume`` continues; the last step gets one too. 0: none."""
    keep_checkpoints: Count = 2
    """Checkpoints to keep; older ones are removed when a newer one is complete."""
    checkpoint_upload: str = ""
    """Folder for copies of complete checkpoints, made while the run goes on: an address (``s3://bucket/run``, ``gs://``, ``az://``) or a
    path. As many are kept as in the run's directory. ``--resume`` takes this address, and ``--resume auto`` looks there too."""
    upload_timeout_s: Positive = 1800.0
    """Seconds that one copy to ``--checkpoint-upload`` may take, and that the end of a run waits for the last one."""
    stop_timeout_s: NonNegative = 15.0
    """Seconds that a first SIGINT or SIGTERM leaves to the step under way and a checkpoint after it; then the run ends without."""
    max_learner_restarts: CountOrZero = 3
    """Times that a run goes on from its last checkpoint by itself when a learner rank dies; without a checkpoint it ends."""
    resume: str = ""
    """Directory of a run to continue with its own settings, or its ``--checkpoint-upload``; or ``auto``: continue the run in ``--run-dir``
    if there is one."""
    runtime: Literal["ray", "local"] = "ray"
    """``ray`` runs engines and learner ranks as Ray actors; ``local`` runs the same classes in this process, for debugging."""
    ray_address: str = ""
    """Ray cluster to join (``auto`` or ``host:port``). Empty starts a private cluster on loopback."""
    stall_timeout_s: Positive = 600.0
    """Stop with a diagnosis if no group finishes and no step ends for this many seconds."""
    check_memory: bool = True
    """Refuse to start on GPUs whose memory is certainly too small, as ``agentrl plan`` computes it."""
    debug: bool = False
    """Show tracebacks and the output of worker processes."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tasks to train and to evaluate on."""

    prompts: str = ""
    """JSONL, CSV or Parquet file, folder of such files, or Hugging Face data set (``name`` or ``name@configuration``); several with commas
    between them. Empty: the environment's own ``tasks()``."""
    prompt_probs: str = ""
    """Proportions in which to draw from several ``--prompts``: ``0.7,0.3``. Empty: they are one collection."""
    prompt_split: str = "train"
    """Split to load when ``--prompts`` names a Hugging Face data set, or a folder whose files are named after their splits."""
    eval_prompts: str = ""
    """Tasks to evaluate on, in the same forms as ``--prompts``. Empty: the environment's own ``eval_tasks()``, else ``--eval-size``."""
    eval_split: str = "test"
    """The same for ``--eval-prompts``."""
    eval_size: CountOrZero = 0
    """Tasks to evaluate on: of ``--eval-prompts`` or ``eval_tasks()`` at most so many (0: all), else so many held out of the training
    tasks, chosen by the seed and never trained on."""
    input_key: str = "prompt"
    """Column that holds the prompt: text or a list of chat messages."""
    label_key: str = "label"
    """Column that holds the label; a missing column gives ``None``."""
    input_template: str = ""
    """Text around each plain-text prompt of a data set, with ``{}`` in its place; ``{{`` and ``}}`` stand for braces."""
    apply_chat_template: bool = True
    """Render a plain-text prompt as one user message with the chat template; off: use the text as it is."""
    system_prompt: str = ""
    """System message put before every chat prompt."""
    remote_rm_url: str = ""
    """Judge of single answers to ``--prompts``, without ``--agent``: URLs of reward servers with commas between, or a reward's file."""
    shuffle: bool = True
    """Draw tasks in an order derived from the seed and the epoch; off: in the given order."""

    @property
    def prompt_sources(self) -> tuple[str, ...]:
        """The data sets that `prompts` names."""
        return listed(self.prompts)

    @property
    def prompt_weights(self) -> tuple[float, ...]:
        """The numbers in `prompt_probs`."""
        return tuple(map(float, listed(self.prompt_probs)))

    @property
    def eval_sources(self) -> tuple[str, ...]:
        """The data sets that `eval_prompts` names."""
        return listed(self.eval_prompts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train."""

    model: str = ""
    """Hugging Face directory or hub name. Empty: the tiny chat model that ships with agentrl."""
    trust_remote_code: bool = False
    """Allow the model's own Python code to run."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Budgets, sampling and deadlines of episodes."""

    groups_per_step: Count = 16
    """Groups that make one optimizer step."""
    n_samples_per_prompt: Count = 8
    """Episodes per task; a group estimator needs at least 2."""
    max_turns: Count = 8
    """Turns of an episode at most; then it is truncated."""
    max_new_tokens: Count = 128
    """Tokens sampled in one turn at most. By model, unless given: 1024 from 5e8 parameters."""
    max_episode_tokens: CountOrZero = 0
    """Tokens of a whole episode at most, prompt and observations included; 0: the context length."""
    temperature: Temperature = 1.0
    """Sampling temperature, from 0.01 to 2; log-probabilities are those of the tempered distribution."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling mass; below 1 the importance ratio is biased and a correction is refused."""
    top_k: CountOrZero = 0
    """Candidates kept for sampling; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, beside the model's end token."""
    reset_timeout_s: Positive = 60.0
    """Deadline of one call of the environment's ``reset``."""
    step_timeout_s: Positive = 60.0
    """Deadline of one call of the environment's ``step``."""
    episode_timeout_s: Positive = 1800.0
    """Deadline of a whole episode."""
    reward_timeout_s: Positive = 45.0
    """Deadline of an answer of ``--remote-rm-url``, further attempts included, and of the scores of ``--reward-model``."""
    reward_batch_size: Count = 64
    """Episodes whose answers go to ``--remote-rm-url`` in one request at most, or through a ``--reward-model`` at once."""
    max_concurrent_episodes: CountOrZero = 0
    """Episodes under way at once beside one engine; whole groups are held back, the oldest first to begin. 0 follows the load of the
    engine: its KV cache and its queue."""
    rollout_workers_per_engine: Count = 1
    """Processes with episodes for each engine. 1: they run in the engine's process. More: where one process cannot feed an engine of many
    GPUs; the engine then has a process of its own, and the others are placed on any machine with a free CPU."""
    env_threads: Count = 32
    """Threads per worker for environments written with plain ``def`` methods."""


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """Environments in processes of their own, one per episode, and what each may use. Limits stop accidents, not attackers."""

    env_isolation: Literal["none", "process"] = "none"
    """``process`` plays every episode in a process of its own; ``none`` in the rollout worker."""
    env_memory_mib: Count = 1024
    """Memory of an episode beyond what importing the file took, MiB."""
    env_cpu_s: Positive = 600.0
    """CPU seconds of an episode."""
    env_file_mib: Count = 256
    """Size of a file that an episode writes, MiB."""
    env_processes: CountOrZero = 32
    """Processes that an episode may have started and that still run."""
    env_open_files: Annotated[int, Ge(16)] = 512
    """Open files and sockets of an episode."""
    env_pass: tuple[str, ...] = ()
    """Names of environment variables that an episode is given besides ``PATH``, ``HOME``, ``LANG``, ``PYTHON*`` and the like."""
    env_reuse: Count = 1
    """Episodes that a process plays one after another; 1 begins each in the state that importing the file left."""


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """The HTTP endpoint that black-box agents talk to; other environments do not use it."""

    max_requests: Count = 1000
    """Requests of one episode that are answered; later ones are refused, and the episode is truncated."""
    train_branches: str = "all"
    """Branches of an episode that are trained: ``all``, ``final`` (that of the last answer which can be trained), or names with commas."""
    forced_forms: Literal["hold", "free"] = "hold"
    """Answers whose form a request forces (a JSON schema, a tool call): ``hold`` them to it, untrained; or leave them ``free``, trained."""
    tool_parser: str = "json"
    """Parser of tool calls: ``json`` (in ``<tool_call>`` tags or bare), or the name of one of vLLM's, as its ``--tool-call-parser``."""
    reasoning_parser: str = ""
    """Parser of reasoning: the name of one of vLLM's. Empty: reasoning is what stands before ``</think>``."""
    record_requests: bool = False
    """Write the requests of the episodes that ``--record`` records to ``requests.jsonl``; ``agentrl replay`` drives them again."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines that sample: vLLM, or models of transformers."""

    engine: str = "auto"
    """Software that samples: ``vllm``; ``transformers``, which is for small models and single devices; or a class of your own,
    ``file.py:Name``, as ``docs/engines.md`` describes. ``auto``: vLLM if it is installed, else transformers."""
    num_engines: Count = 1
    """Inference engines; a group runs on the least loaded one."""
    tensor_parallel_size: Count = 1
    """GPUs per engine; on a CPU processes."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of vLLM's, as ``name=value`` with JSON values: ``kv_cache_dtype=fp8 pipeline_parallel_size=2``."""
    colocate: bool = False
    """Engines and learner ranks share GPUs, each engine those of ``--tensor-parallel-size`` ranks, and take turns; weights move over
    CUDA IPC."""
    sleep_level: Literal[0, 1, 2] = 1
    """With ``--colocate``: what engines do while the learner has the GPUs. 1: their weights go to CPU memory. 2: their weights are
    dropped where new ones follow. 0: there are no turns, and both stay in GPU memory."""
    learner_memory_gib: NonNegative = 0.0
    """With ``--colocate``: GPU memory that a learner rank keeps while its engine generates, GiB; 0: as ``agentrl plan`` computes it."""
    weight_transport: Literal["auto", "nccl", "ipc", "shm", "disk"] = "auto"
    """Path of new weights to engines: between GPUs (``nccl``), on shared GPUs (``ipc``), through shared memory of one machine (``shm``), or
    through ``--run-dir``, for engines that cannot join a group of NCCL (``disk``). ``auto``: one of the first three."""
    weight_bucket_mib: Count = 512
    """Size of a bucket of weights on their way through NCCL, MiB; the first learner rank and every engine hold two of them."""
    publish_timeout_s: Positive = 300.0
    """Deadline of a publication: an engine that has not taken the weights by then is lost, and the others take them without it."""
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the engines' weights. ``auto``: float32 on CPU, bfloat16 on GPU."""
    max_model_len: CountOrZero = 0
    """Context length; 0: the model's own, at most 4096 on CPU."""
    max_num_seqs: Count = 256
    """Sequences an engine decodes at once."""
    kv_cache_gib: Positive = 0.25
    """Memory for the KV cache of a CPU engine, and of an engine of transformers on any device, GiB."""
    kv_on_publish: Literal["recompute", "keep"] = "recompute"
    """Keys and values of requests under way when new weights arrive. ``recompute``: the new weights process their tokens again.
    ``keep``: they go on at once, on keys and values of older weights; requests that begin later never read those."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None
    """Share of GPU memory an engine may take. Unset: 0.9; with ``--colocate`` what ``--learner-memory-gib`` leaves."""
    engine_timeout_s: Positive = 300.0
    """Replace an engine that is busy for this many seconds and finishes no request."""
    max_engine_restarts: CountOrZero = 3
    """Times that a lost engine is started again before the run goes on without it, or ends if none is left."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs; always so on CPU."""

    @property
    def uses_vllm(self) -> bool:
        """True if vLLM samples."""
        return self.engine == "vllm" or (self.engine == "auto" and importlib.util.find_spec("vllm") is not None)

    @property
    def sleeps(self) -> bool:
        """True if engines and learner take turns on the GPUs that they share."""
        return self.colocate and self.sleep_level > 0

    def memory_share(self, gpu_bytes: float) -> float:
        """Return the share of a GPU of `gpu_bytes` that an engine may take; half of one whose learner's needs are not known."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        if not self.colocate:
            return 0.9
        return max(0.05, 0.95 - self.learner_memory_gib * 2**30 / gpu_bytes) if self.learner_memory_gib else 0.5

    @property
    def gpus_per_engine(self) -> int:
        """Workers, and so GPUs, of an engine: tensor parallel times pipeline parallel."""
        return workers_per_engine(self.tensor_parallel_size, self.engine_args)


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """Overlap of generation and training, filtering of groups, and reaction to failures."""

    asynchronous: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Generate while training; short for ``--max-staleness 1``."""
    max_staleness: Annotated[int, Ge(0), Le(64)] | None = None
    """Optimizer steps a trained token may be older than the weights it trains; 0 is synchronous training."""
    task_sampling: Literal["epochs", "curriculum", "failures", "learnability"] = "epochs"
    """Order of drawing tasks: ``epochs`` in an order of the seed; by the pass rate seen so far, ``curriculum`` (each task once, the easiest
    first), or at random in proportion to 1 - rate (``failures``) or rate x (1 - rate) (``learnability``)."""
    task_exploration: Annotated[float, Gt(0), Le(1)] = 0.1
    """With ``--task-sampling failures`` or ``learnability``: share of the draws that goes to all tasks alike."""
    curriculum_key: str = ""
    """With ``--task-sampling curriculum``: number in a task's metadata that orders tasks of the same pass rate, the smallest first."""
    dynamic_filtering: bool = False
    """Train only on groups whose mean score lies strictly inside ``--dynamic-filtering-range`` and whose rewards differ."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Open interval of mean scores that are kept."""
    group_filter: str = ""
    """Function of your own, ``file.py:name``, that says which groups are trained, in place of ``--dynamic-filtering``."""
    min_pass_rate: Fraction = 0.01
    """Stop the run if a smaller share of the last groups (at least 512) passes the filter; 0 never stops it."""
    oversample: NonNegative = 0.0
    """Groups to start beyond those a step trains on, as a share of them; the first to finish are kept and the rest is dropped.
    Saves waiting for the slowest, favours short episodes, and makes even a synchronous run depend on timing."""
    group_quorum: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of a group's episodes that have to end well before the group may be closed without the rest; 1: it waits for all. Saves
    waiting for the slowest, makes even a synchronous run depend on timing, and the policy learns less of what takes long."""
    straggler_factor: Annotated[float, Gt(1)] = 3.0
    """With ``--group-quorum``: how many times the median of those that ended the rest may take before it is withheld."""
    max_attempts: Count = 2
    """Attempts at a group before it is dropped with its reason."""
    max_failure_rate: Fraction = 0.5
    """Stop the run if more than this share of the last 64 attempts at groups (at least 8) failed; see ``--max-attempts``."""

    @property
    def staleness(self) -> int:
        """The bound S in force: `max_staleness`, else 1 with `asynchronous`, else 0."""
        return int(self.asynchronous) if self.max_staleness is None else self.max_staleness


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measuring the model, in a run and with ``agentrl eval``. What it is measured on is said by ``--eval-prompts``, the
    environment's ``eval_tasks()`` or ``--eval-size``.
    """

    eval_every: CountOrZero = 0
    """Steps between two evaluations during training; the last step gets one too. 0: none."""
    eval_at_start: bool = False
    """Evaluate once before the first step as well."""
    eval_samples: Count = 4
    """Episodes per task; pass@k is estimated for k up to this."""
    eval_temperature: TemperatureOrZero | None = None
    """Sampling temperature of evaluations, at most 2; 0 takes the most likely token each time. Unset: ``--temperature``."""
    eval_by: str = ""
    """Key of the tasks' metadata by which figures are given apart. Empty: ``kind``, else ``source``, where tasks have them."""
    eval_pass_score: Fraction = 1.0
    """Score from which an episode counts as solved in pass@k."""
    keep_best: str = ""
    """Figure by which the best model is kept in ``RUN_DIR/best``: ``eval/score``, ``eval/reward``, ``eval/pass@1``, or one kind's,
    ``eval/score/hard``; higher is better. Empty: none is kept."""


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Records and metrics of a run."""

    record: Record = "sample"
    """Trajectories written to ``trajectories.jsonl``: none, one per group, or every one; as many of each task of an evaluation go to
    ``eval_trajectories.jsonl``."""
    annotate: bool = True
    """Write what the learner knows of every token of the recorded trajectories to ``annotations.jsonl``: log-probability, ratio, advantage,
    entropy, share of the loss, and whether and why it was masked. See ``docs/viewer.md``."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str = ""
    """Weights & Biases project; empty: off. Needs ``pip install wandb``."""
    trackio_project: str = ""
    """Trackio project; empty: off. Needs ``pip install trackio``."""
    sink: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Metric sink of your own, ``file.py:Name``, beside the others; may be given several times. See ``docs/callbacks.md``."""
    callback: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Class that follows the run, ``file.py:Name``; may be given several times. See ``docs/callbacks.md``."""
    callback_timeout_s: Positive = 300.0
    """Deadline of one call of a callback's method; then the run ends with an error."""
    save_model: bool = True
    """Write the final policy as a Hugging Face directory."""
    push_to_hub: str = ""
    """Repository ``ORGANISATION/NAME`` that the final policy is uploaded to, on the Hugging Face hub or the one at ``HF_ENDPOINT``; it is
    made, private, if there is none. Needs a token (``HF_TOKEN``)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything ``agentrl train`` needs, one section per concern."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
