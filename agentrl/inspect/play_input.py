"""Input from a person or a pipe: answers of one line or several, and commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

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
    "A line is an answer. An answer of several lines begins and ends with a line of three double quotes; an empty one is\n"
    "nothing between them. A line that begins with a slash is a command; write two slashes for an answer that does."
)


class Leave(Exception):  # noqa: N818, it is no error
    """The person leaves the episode.

    Args:
        action: ``next``, ``restart``, ``task`` or ``quit``.
        argument: The words after it.
    """

    def __init__(self, action: str, argument: str = "") -> None:
        super().__init__(action, argument)
        self.action, self.argument = action, argument


class Reader:
    """Reads lines.

    Args:
        tell: Shows a message.
        toggle: Carries out the commands that do not leave the episode.
        stream: Where lines come from; standard input by default.

    Attributes:
        interactive: A person at a terminal types the lines.
        ended: There are no more lines.
    """

    def __init__(self, tell: Callable[[str], None], toggle: Callable[[str], None], stream: TextIO | None = None) -> None:
        self._tell, self._toggle, self._stream = tell, toggle, stream or sys.stdin
        self.interactive = self._stream.isatty()
        self.ended = False
        self._waiting: list[str] = []
        if self.interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, gives input() its editing keys

    def answer(self, prompt: str) -> str:
        """The next answer.

        Raises:
            Leave: If a command leaves the episode, or nothing more comes.
        """
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
        """Wait for the Enter key.

        Raises:
            Leave: If a command leaves the episode, or nothing more comes.
        """
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
        """Return True if another line comes; commands before it are carried out.

        Raises:
            Leave: If one of them leaves the episode.
        """
        line = self._line("")
        if line is None:
            return False
        if line.startswith("/") and not line.startswith("//"):
            self.command(line)
            return self.more()
        self._waiting.append(line)
        return True

    def command(self, line: str) -> None:
        """Carry out a command.

        Raises:
            Leave: If it leaves the episode.
        """
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
