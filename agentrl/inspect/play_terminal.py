"""The terminal of ``agentrl play``: input of a person or a pipe, and output of messages, pictures, rewards and, on request, tokens."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from agentrl.core.images import ImageInput
from agentrl.core.protocols import GenerationRequest
from agentrl.core.types import Message, Prompt, Status, Trajectory
from agentrl.env.images import file_suffix
from agentrl.env.results import RawText
from agentrl.inspect.episodes import show_logprobs
from agentrl.rollout.chat import ChatCodec
from agentrl.rollout.images import decoded
from agentrl.rollout.observers import ResetEvent, SampleEvent, StepEvent
from agentrl.track.text import Screen, counted

MOST_COLUMNS, MOST_LINES = 64, 24
HALF = "▀"
"""A character whose upper half has the colour of the text, and whose lower half that of its background."""


class PictureScreen:
    """Prints images as a model reads them, numbered within an episode."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._number = 0
        self._folder: Path | None = None  # of pictures that the terminal cannot show

    def begin(self) -> None:
        """Begin to count anew."""
        self._number = 0

    def show(self, images: Iterable[ImageInput]) -> None:
        """Print images; where the terminal has no colours, the paths of files with their bytes."""
        for image in images:
            self._number += 1
            picture = decoded(image.data, max_pixels=2**62)  # it was small enough for the reader
            size = f"{picture.width} x {picture.height} pixels, {len(image.token_ids)} tokens"
            place = "" if self._screen.paints else f", {self._written(image)}"
            self._screen.line((f"picture {self._number}: ", "cyan"), size + place, indent=2)
            if self._screen.paints:
                picture.thumbnail((min(MOST_COLUMNS, self._screen.console.width - 2), 2 * MOST_LINES))
                for parts in lines_of(picture):
                    self._screen.line("  ", *parts)

    def _written(self, image: ImageInput) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-pictures-"))
        path = self._folder / f"{image.key[:16]}{file_suffix(image.data)}"
        if not path.exists():
            path.write_bytes(image.data)
        return path


def lines_of(picture: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield texts with their styles for each two rows of pixels of a PIL image of the mode RGB, from the top."""
    pixels = np.asarray(picture)
    for row in range(0, len(pixels), 2):
        styles = (" on ".join(f"rgb({r},{g},{b})" for r, g, b in column.tolist()) for column in pixels[row : row + 2].swapaxes(0, 1))
        yield [(HALF * len(list(same)), style) for style, same in groupby(styles)]


BLOCK = '"""'

COMMANDS: Mapping[str, str] = {
    "help": "list the commands",
    "next": "leave this episode, begin the next task",
    "restart": "begin this task again",
    "task": "begin a task, by its number or its id: /task 7",
    "text": "show everything that the policy has read and written so far, token for token",
    "tokens": "show token ids, or stop showing them",
    "quit": "leave",
}

HELP = (
    "A line is an answer. An answer of several lines begins and ends with a line of three double quotes; an empty one is "
    "nothing between them. A line that begins with a slash is a command; write two slashes for an answer that does."
)


class Leave(Exception):  # noqa: N818, it is no error
    """The person leaves the episode: ``next``, ``restart``, ``task`` or ``quit``, and the words after it."""

    def __init__(self, action: str, argument: str = "") -> None:
        super().__init__(action, argument)
        self.action, self.argument = action, argument


class Reader:
    """Reads lines of a person at a terminal (`interactive`) or of a pipe, until they have `ended`."""

    def __init__(self, tell: Callable[[str], None], toggle: Callable[[str], None], stream: TextIO | None = None) -> None:
        self._tell, self._toggle, self._stream = tell, toggle, stream or sys.stdin
        self.interactive = self._stream.isatty()
        self.ended = False
        self._waiting: list[str] = []
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, gives input() its editing keys

    def answer(self, prompt: str) -> str:
        """Return the next answer; `Leave` is raised if a command leaves the episode, or no more lines come."""
        while True:
            line = self._line(prompt)
            if line is None:
                raise Leave("quit")
            if line.strip() == BLOCK:
                return self._block()
            if line.startswith("//"):
                return line[1:]
            if line.startswith("/"):
                self.command(line)
            elif line:
                return line
            elif self.interactive:
                self._tell(f"An empty line is no answer; for an empty one write {BLOCK} twice. /help lists the commands.")

    def pause(self, prompt: str) -> None:
        """Wait for the Enter key; `Leave` is raised if a command leaves the episode, or no more lines come."""
        while True:
            line = self._line(prompt)
            if line is None:
                raise Leave("quit")
            if not line.strip():
                return
            if line.startswith("/"):
                self.command(line)
            else:
                self._tell("Press Enter to go on, or write a command; /help lists them.")

    def more(self) -> bool:
        """Return True if another line comes; commands before it are carried out, and one may raise `Leave`."""
        line = self._line("")
        if line is None:
            return False
        if line.startswith("/") and not line.startswith("//"):
            self.command(line)
            return self.more()
        self._waiting.append(line)
        return True

    def command(self, line: str) -> None:
        """Carry out a command; `Leave` is raised if it leaves the episode."""
        name, _, argument = line.strip().removeprefix("/").partition(" ")
        near = [known for known in COMMANDS if name and known.startswith(name)]
        if len(near) != 1:
            self._tell(f"There is no command /{name}. /help lists them; write //{name} for an answer that begins with a slash.")
        elif near[0] == "help":
            self._tell(HELP + "\n" + "\n".join(f"/{known:<8} {what}" for known, what in COMMANDS.items()))
        elif near[0] in ("text", "tokens"):
            self._toggle(near[0])
        elif near[0] == "task" and not argument.strip():
            self._tell("Say which task: /task 7")
        else:
            raise Leave(near[0], argument.strip())

    def _block(self) -> str:
        lines: list[str] = []
        while (line := self._line("...  ")) is not None and line.strip() != BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self._waiting:
            return self._waiting.pop()
        if self.ended:
            return None
        try:
            if self.interactive:
                return input(prompt)
            line = self._stream.readline()
        except EOFError:
            line = ""
        if not line:
            self.ended = True
            return None
        return line.rstrip("\r\n")


FEW = 64
"""Tokens that are listed at most of what the policy reads; of what it writes, all are."""


class PlayScreen:
    """Prints an episode as it goes on; `chat`: plain text becomes a user message; `model`: a model plays, and its turns are printed."""

    def __init__(
        self, screen: Screen, codec: ChatCodec, *, system_prompt: str, chat: bool, model: bool, tokens: bool, logprobs: bool
    ) -> None:
        self._screen, self._codec = screen, codec
        self._system_prompt, self._chat, self._model, self._logprobs = system_prompt, chat, model, logprobs
        self.tokens = tokens
        self._pictures = PictureScreen(screen)
        self._read: dict[str, int] = {}  # conversation -> tokens of it that were shown
        self._latest: list[int] = []  # every token that was read and written for the latest answer, and that answer
        self._told = False  # whether the environment says what is read; an executor does not

    def toggle(self, name: str) -> None:
        """Carry out ``/tokens`` or ``/text``."""
        if name == "tokens":
            self.tokens = not self.tokens
            self._screen.line((f"Token ids are {'shown from now on' if self.tokens else 'no longer shown'}.", "dim"))
        elif not self._latest:
            self._screen.line(("Nothing was read yet.", "dim"))
        else:
            self._screen.line(self._codec.decode(self._latest))

    def begin(self, title: str) -> None:
        """Print the heading of an episode."""
        self._read, self._latest, self._told = {}, [], False
        self._pictures.begin()
        self._screen.line()
        self._screen.line((title, "bold"))

    def on_reset(self, event: ResetEvent) -> None:
        """Print what is read first."""
        result, self._told = event.result, True
        for agent, opening in result.observations.items():
            self._prompt(opening, f" to {agent}")
        if result.observation is not None or not result.observations:
            prompt = event.task.prompt if result.observation is None else result.observation
            self._prompt(prompt, f" to {result.agent}" if result.agent else "")
        self._numbers("info", result.info)

    def asked(self, request: GenerationRequest) -> None:
        """Take in what is to be answered, and print its new images, and on request its new tokens."""
        self._latest = request.prompt_ids.tolist()
        shown = self._read.get(request.session, 0)
        new = self._latest[shown:]
        self._read[request.session] = len(request.prompt_ids)
        if not self._told:
            self._screen.line(("reads", "bold blue"))
            self._screen.line(self._codec.decode(new), indent=2)
        self._pictures.show(each.image for each in request.placed if each.place >= shown)
        if self.tokens:
            most, left = new[:FEW], len(new) - FEW
            self._ids(f"reads {len(new)} tokens, {len(request.prompt_ids)} in all", most, f" and {left} more" if left > 0 else "")

    def on_sample(self, event: SampleEvent) -> None:
        """Print a turn of a model; of a person's, only what a limit cut off."""
        generation, session = event.generation, event.request.session
        ids = generation.token_ids.tolist()
        self._read[session] = self._read.get(session, 0) + len(ids)
        self._latest = [*event.request.prompt_ids.tolist(), *ids]
        cut = generation.finish_reason == "length"
        if self._model:
            self._screen.line(("assistant", "bold green"), ("  cut at its limit" if cut else "", "yellow"))
            self._screen.line(self._codec.decode(ids), indent=2)
        elif cut:
            shortened = f"cut to {len(ids)} tokens, as a model's turn would be (--max-new-tokens): {self._codec.decode(ids)}"
            self._screen.line((shortened, "yellow"))
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
        self._screen.line((str(first.status), style), f" after {counted(turns, 'turn')}")
        for trajectory in trajectories:
            if trajectory.reward is not None:
                who = f"{trajectory.agent}: " if trajectory.agent else ""
                self._screen.line(f"{who}reward {trajectory.reward:g}, score {trajectory.score:g}", indent=2)
                self._numbers("parts", trajectory.reward_parts)
        if first.error:
            self._screen.line((first.error, "red"), indent=2)

    def _prompt(self, prompt: Prompt, to: str, *, first: bool = True) -> None:
        is_raw = isinstance(prompt, RawText) or (isinstance(prompt, str) and not self._chat)
        role = "text as it is" if is_raw else "user"
        messages = [Message(role=role, content=prompt)] if isinstance(prompt, str) else list(prompt)
        if first and self._system_prompt and not is_raw and messages[0]["role"] != "system":
            messages.insert(0, Message(role="system", content=self._system_prompt))
        for message in messages:
            self._screen.line((str(message["role"]) + to, "bold blue"))
            self._screen.line(_content(message), indent=2)
            self._tools(message.get("tools") or ())

    def _tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Print the functions that may be called."""
        for tool in (schema.get("function", schema) for schema in tools):
            arguments = tool.get("parameters", {}).get("properties", {})
            signature = ", ".join(f"{name}: {value.get('type', 'any')}" for name, value in arguments.items())
            told = str(tool.get("description", "")).partition("\n")[0]
            self._screen.line(("tool ", "cyan"), (f"{tool.get('name', '?')}({signature})", "bold"), f"  {told}", indent=2)
        if tools:
            self._screen.line(("/text shows how the model is told of them, and how they are called", "dim"), indent=2)

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
