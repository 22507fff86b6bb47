"""The report of a check, for people."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.check.findings import Finding, Report, Severity, by_severity
from agentrl.track.text import counted, figures_table, wrapped

COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
WIDTH = 110
MAX_SHOWN = 1000.0
"""More episodes in a second than any worker generates."""


def print_report(report: Report, *, fix_hints: bool = False, console: Console | None = None) -> None:
    """Write tables, findings and a summary to standard output or to `console`; `fix_hints` adds code to each remedy."""
    out = console or Console(highlight=False, soft_wrap=False)
    # Without a terminal rich would assume 80 columns.
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH
    tasks = report.env.get("tasks")
    name = Text.assemble((str(report.env.get("name", "")), "bold"), f" ({report.env.get('source', '')}), ")
    out.print(name.append("tasks without an end" if tasks is None else counted(tasks, "task")))
    if model := report.env.get("model"):
        out.print(Text("\n".join(wrapped(f"Model: {model}", out.width))))
    for title, (headings, rows) in (("Rewards by policy", policy_rows(report)), ("Time per call", _timing_rows(report))):
        if rows:
            out.print()
            out.print(Text(title, style="bold"))
            out.print(figures_table(headings, rows, style="dim"))
    for line in _lines(report):
        out.print(Text("\n".join(wrapped(line, out.width))))
    for finding in by_severity(report.findings):
        out.print()
        out.print(_finding(finding, fix_hints, out.width))
    out.print()
    out.print(_summary(report))


def policy_rows(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table of rewards by policy: its headings and its rows."""
    rows: list[tuple[str, ...]] = []
    for row in report.policies:
        counts = str(row["episodes"]), str(row["failed"]), str(row["finished"]), f"{row['turns']:.1f}"
        agents = row.get("agents", {})
        rows.append((row["policy"], *counts, *([] if agents else _earned(row))))
        # A sum over agents would hide who won.
        rows += [(f"  {agent}", "", "", "", "", *_earned(earned)) for agent, earned in agents.items()]
    return ("policy", "episodes", "failed", "ended", "turns", "reward", "lowest", "highest", "score"), rows


def _earned(numbers: Mapping[str, float]) -> list[str]:
    return [f"{numbers[key]:.2f}" for key in ("reward", "reward_min", "reward_max", "score")]


def _timing_rows(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    columns = ("p50_s", "p99_s", "first_s")
    rows = [(row["method"], row["runs"], str(row["calls"]), *(_seconds(row[key]) for key in columns)) for row in report.timing]
    return ("method", "runs on", "calls", "p50", "p99", "first"), rows


def _lines(report: Report) -> list[str]:
    lines = [""]
    speed, prompts, constant = report.speed, report.prompts, report.constant
    if speed:
        threads = f", {speed['threads_needed']} of {speed['env_threads']} threads busy" if speed["threads_needed"] else ""
        bound = min(speed["episodes_per_s"], MAX_SHOWN)
        allowed = f"{'more than' if bound == MAX_SHOWN else 'at most'} {bound:,.0f} episodes/s"
        load = f"{speed['concurrency']} episodes at once, turns of {speed['turn_s']:g} s{threads}"
        lines.append(f"Speed: {load}; the environment allows {allowed}")
    if report.requests:
        lines += _request_lines(report.requests)
    lines += _harness_lines(report.harness) if report.harness else []
    if prompts:
        tokens = f"{prompts['min']} to {prompts['max']} tokens (median {prompts['p50']})"
        lines.append(f"First prompts: {tokens}, context {prompts['max_model_len']}")
    if constant and not constant["score"]:
        lines.append(f"Best constant answer: none scores more than 0 over {constant['tasks']} tasks")
    elif constant:
        answer = repr(constant["answer"][:40])
        lines.append(f"Best constant answer: {answer}, mean score {constant['score']:.2f} over {constant['tasks']} tasks")
    return lines + [f"Not checked: {reason}" for reason in report.skipped]


def _finding(finding: Finding, fix_hints: bool, width: int) -> Text:
    known = finding.rule
    times = f" ({finding.count} times)" if finding.count > 1 else ""
    head = Text.assemble((f"{known.severity} ", COLOURS[known.severity]), (finding.id, "bold"), f": {known.title}{times}")
    for line in (f"{finding.where}: {finding.seen}", f"why: {known.why}", f"fix: {known.remedy}"):
        head.append("\n" + textwrap.fill(line, width, initial_indent="  ", subsequent_indent="       "))
    if fix_hints and known.snippet:
        head.append("\n" + textwrap.indent(known.snippet, " " * 7), "green")
    return head


def _counts(report: Report) -> dict[Severity, int]:
    return {severity: sum(finding.rule.severity is severity for finding in report.findings) for severity in Severity}


def summary_text(report: Report) -> str:
    """Return the numbers of errors, warnings and notes in words, and whether everything was checked."""
    counts = _counts(report)
    words = ", ".join(counted(count, severity) for severity, count in counts.items())
    if not report.num_episodes and not counts[Severity.ERROR]:
        words = f"no episode was played{''.join(f', {counted(count, severity)}' for severity, count in counts.items() if count)}"
    return f"incomplete, --budget-s was over: {words}" if report.out_of_time else words


def _summary(report: Report) -> Text:
    counts, words = _counts(report), summary_text(report)
    style = next((COLOURS[severity] for severity in (Severity.ERROR, Severity.WARNING) if counts[severity]), "bold green")
    style = COLOURS[Severity.WARNING] if style == "bold green" and (report.out_of_time or not report.num_episodes) else style
    return Text.assemble((words, style), f" in {report.seconds:.1f} s")


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def _request_lines(asked: Mapping[str, Any]) -> list[str]:
    """Requests and branches of a black-box agent."""
    tools = f"; tools: {', '.join(asked['tools'])}" if asked["tools"] else ""
    sizes = asked["prompt_tokens"]
    tokens = f"; prompts of {sizes[0]} to {sizes[2]} tokens (median {sizes[1]})" if sizes else ""
    head = f"Requests: {asked['requests']} in {asked['episodes']} episodes, {asked['streamed']} streamed, {asked['refused']} refused"
    branches = ", ".join(f"{reason} {count}" for reason, count in asked["branches"].items()) or "none besides the first of each episode"
    untrained = ", ".join(f"{reason} {count}" for reason, count in asked["untrained"].items())
    lines = [f"{head}{tokens}{tools}", f"Branches that were opened: {branches}"]
    lines += [f"Answers that would not be trained: {untrained}"] if untrained else []
    return [*lines, "Requests of the first episode:", *(f"  {line}" for line in asked["first"])]


def _reasons(session: Mapping[str, Any]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in session["branches"].items())


def _harness_lines(harness: Mapping[str, Any]) -> list[str]:
    """Return the report of a program's sessions for people."""
    other = f", tried: {harness['tried']}" if harness["version"] != harness["tried"] else ""
    lines = [f"{harness['title']} {harness['version']}{other}, dialect {harness['dialect']}{', brief' if harness['brief'] else ''}"]
    if session := harness.get("session"):
        rows = ", ".join(map(str, session["rows"])) or "none"
        helpers = ", ".join(f"{helper['tokens']} tokens ({helper['why']})" for helper in session["helpers"]) or "none"
        rewritten = ", ".join(f"{change} {count}" for change, count in session["rewritten"].items()) or "nothing"
        lines += [
            f"Ten edits: {session['requests']} requests, {session['reads']} files read, {session['edits']} edits made",
            f"First prompt: {session['first_prompt']} tokens",
            f"Rows: {len(session['rows'])}, of {rows} tokens, {session['sampled']} sampled; {session['wasted']} tokens wasted",
            f"Branches that were opened: {_reasons(session) or 'none'}; helpers: {helpers}",
            f"Rewritten by the program: {rewritten}",
        ]
    if full := harness.get("small context"):
        lines.append(f"Small context: {full['refused']} of {full['requests']} requests refused, {_end(full)}")
    if failed := harness.get("failing engine"):
        lines.append(f"Engine that fails once: {failed['retries']} marked retries, {_end(failed)}")
    return lines


def _end(session: Mapping[str, Any]) -> str:
    opened = f"branches: {_reasons(session)}; " if session["branches"] else ""
    if session["complete"]:
        return f"{opened}it goes on to its end"
    return f"{opened}{'it ends early' if session['ended'] else 'it gives up: ' + session['error']}"
