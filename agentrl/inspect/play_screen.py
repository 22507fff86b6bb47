"""Output of ``agentrl play``: messages, rewards, and on request the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Message, Prompt, Status, Trajectory
from agentrl.env.results import RawText
from agentrl.inspect.episodes import show_logprobs
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.observers import ResetEvent, SampleEvent, StepEvent
from agentrl.track.text import Screen

FEW = 64
"""Tokens that are listed at most of what the policy reads; of what it writes, all are."""


class PlayScreen:
    """Prints an episode as it goes on.

    Args:
        screen: Where to.
        codec: Spells tokens.
        system_prompt: System message put before a chat that does not begin with one.
        chat: Plain text becomes a user message.
        model: A model plays, and its turns are printed.
        tokens: Print token ids.
        logprobs: Print the log-probability of every on_sample token.
    """

    def __init__(
        self, screen: Screen, codec: ChatCodec, *, system_prompt: str, chat: bool, model: bool, tokens: bool, logprobs: bool
    ) -> None:
        self._screen, self._codec = screen, codec
        self._system_prompt, self._chat, self._model, self._logprobs = system_prompt, chat, model, logprobs
        self.tokens = tokens
        self._read: dict[str, int] = {}  # conversation -> tokens of it that were shown
        self._latest: GenerationRequest | None = None
        self._told = False  # whether the environment says what is read; an executor does not

    def tell(self, text: str) -> None:
        """Print a message that is no part of the episode."""
        self._screen.line((text, "dim"))

    def toggle(self, name: str) -> None:
        """Carry out ``/tokens`` or ``/text``."""
        if name == "tokens":
            self.tokens = not self.tokens
            self.tell(f"Token ids are {'shown from now on' if self.tokens else 'no longer shown'}.")
        elif self._latest is None:
            self.tell("Nothing was read yet.")
        else:
            self._screen.line(self._codec.decode(self._latest.prompt_ids.tolist()))

    def begin(self, title: str) -> None:
        """Print the heading of an episode."""
        self._read, self._latest, self._told = {}, None, False
        self._screen.line()
        self._screen.line((title, "bold"))

    def on_reset(self, event: ResetEvent) -> None:
        """Print what is read first."""
        result, self._told = event.result, True
        for agent, opening in result.observations.items():
            self._prompt(opening, f" to {agent}")
        if result.observation is not None or not result.observations:
            self._prompt(
                event.task.prompt if result.observation is None else result.observation, f" to {result.agent}" if result.agent else ""
            )
        self._numbers("info", result.info)

    def asked(self, request: GenerationRequest) -> None:
        """Take in what is to be answered, and print its new tokens on request."""
        self._latest = request
        shown = self._read.get(request.session, 0)
        new = request.prompt_ids.tolist()[shown:]
        self._read[request.session] = len(request.prompt_ids)
        if not self._told:
            self._screen.line(("reads", "bold blue"))
            self._screen.line(self._codec.decode(new), indent=2)
        if self.tokens:
            most, left = new[:FEW], len(new) - FEW
            self._ids(f"reads {len(new)} tokens, {len(request.prompt_ids)} in all", most, f" and {left} more" if left > 0 else "")

    def on_sample(self, event: SampleEvent) -> None:
        """Print a turn of a model; of a person's, only what a limit cut off."""
        generation, session = event.generation, event.request.session
        ids = generation.token_ids.tolist()
        self._read[session] = self._read.get(session, 0) + len(ids)
        cut = generation.finish_reason == "length"
        if self._model:
            self._screen.line(("assistant", "bold green"), ("  cut at its limit" if cut else "", "yellow"))
            self._screen.line(self._codec.decode(ids), indent=2)
        elif cut:
            self._screen.line(
                (f"cut to {len(ids)} tokens, as a model's turn would be (--max-new-tokens): {self._codec.decode(ids)}", "yellow")
            )
        if self.tokens:
            self._ids(f"writes {len(ids)} tokens", ids)
        if self._logprobs:
            show_logprobs(self._screen, generation.logprobs.tolist(), self._pieces(ids), every=True)

    def on_step(self, event: StepEvent) -> None:
        """Print what a turn earned and what the environment answered."""
        result = event.result
        score = "" if result.score is None else f"  score {result.score:g}"
        self._screen.line(("reward ", "cyan"), f"{result.reward:g}{score}", indent=2)
        for name, values in (("parts", result.reward_parts), ("info", result.info), ("rewards", result.rewards), ("scores", result.scores)):
            self._numbers(name, values)
        if result.sampling:
            self._screen.line(("sampling ", "cyan"), "  ".join(f"{key} {value}" for key, value in result.sampling.items()), indent=2)
        if result.observation is not None and not (result.terminated or result.truncated):
            self._prompt(result.observation, f" to {result.agent}" if result.agent else "", first=False)

    def ended(self, trajectories: Sequence[Trajectory]) -> None:
        """Print how the episode ended."""
        first = trajectories[0]
        style = {Status.FINISHED: "bold green", Status.TRUNCATED: "bold yellow"}.get(first.status, "bold red")
        turns = sum(len(trajectory.turns) for trajectory in trajectories)
        self._screen.line((str(first.status), style), f" after {turns} turn{'s' * (turns != 1)}")
        for trajectory in trajectories:
            if trajectory.reward is not None:
                who = f"{trajectory.agent}: " if trajectory.agent else ""
                self._screen.line(f"{who}reward {trajectory.reward:g}, score {trajectory.score:g}", indent=2)
                self._numbers("parts", trajectory.reward_parts)
        if first.error:
            self._screen.line((first.error, "red"), indent=2)

    def _prompt(self, prompt: Prompt, to: str, *, first: bool = True) -> None:
        if not isinstance(prompt, str):
            messages: list[Message] = list(prompt)
            if first and self._system_prompt and messages[0]["role"] != "system":
                messages.insert(0, Message(role="system", content=self._system_prompt))
        elif isinstance(prompt, RawText) or not self._chat:
            messages = [Message(role="text as it is", content=prompt)]
        else:
            system = [Message(role="system", content=self._system_prompt)] if first and self._system_prompt else []
            messages = [*system, Message(role="user", content=prompt)]
        for message in messages:
            self._screen.line((str(message["role"]) + to, "bold blue"))
            self._screen.line(_content(message), indent=2)

    def _numbers(self, name: str, values: Mapping[str, float]) -> None:
        if values:
            self._screen.line((f"{name} ", "cyan"), "  ".join(f"{key} {value:g}" for key, value in values.items()), indent=2)

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._codec.decode([token]) for token in ids]

    def _ids(self, title: str, ids: Sequence[int], rest: str = "") -> None:
        pairs = " ".join(f"{token}:{piece!r}" for token, piece in zip(ids, self._pieces(ids), strict=True))
        self._screen.line((f"{title}: ", "cyan"), (pairs + rest, "dim"), indent=2)


def _content(message: Message) -> str:
    content: Any = message["content"]
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)
    calls = message.get("tool_calls")
    return ("" if content is None else str(content)) + (f"\n{calls}" if calls else "")
