"""What a check is asked to do; of JSON's own types, because it is handed to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings of one check.

    Attributes:
        env: What ``--agent`` would be.
        prompts: Data set with the tasks; empty: the environment's own.
        prompt_split: Split of a data set from a hub.
        input_key: Column that holds the prompt.
        label_key: Column that holds the label.
        model: Directory or hub name whose tokenizer is used.
        model_given: Whether the user chose it; otherwise it is the bundled one, and says little about the user's own.
        max_model_len: Context length in tokens.
        max_new_tokens: Tokens of a turn.
        max_turns: Turns of an episode.
        concurrency: Episodes that a worker is to run at once.
        env_threads: Threads for plain ``def`` methods.
        turn_s: Seconds that a model is assumed to take for one turn.
        episodes: Episodes per policy.
        recorded: ``trajectories.jsonl``, or the directory of the run that holds it; empty: none.
        timeout_s: Deadline of one call of user code.
        budget_s: Seconds for all of it.
        elsewhere: Whether tasks and episodes are compared with those of a second process.
        seed: Decides tasks, seeds and the answers of the random policies.
    """

    env: str
    prompts: str = ""
    prompt_split: str = "train"
    input_key: str = "prompt"
    label_key: str = "label"
    model: str = ""
    model_given: bool = False
    max_model_len: int = 0
    max_new_tokens: int = 128
    max_turns: int = 8
    concurrency: int = 128
    env_threads: int = 32
    turn_s: float = 1.0
    episodes: int = 8
    recorded: str = ""
    timeout_s: float = 30.0
    budget_s: float = 120.0
    elsewhere: bool = True
    seed: int = 0
