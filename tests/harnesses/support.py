"""The toy agent as a harness."""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl.harness import Harness, Script, Setup

TOY = Path(__file__).with_name("toy.py")


def toy(mode: str = "") -> Harness:
    """The toy agent, which does this to its history."""
    return Harness(
        title="Toy",
        program="toy",
        package="toy",
        version="1.0",
        dialects={"chat": "chat"},
        start=Setup(variables={"TOY": mode}, files={".toy/settings.json": '{"address": "{address}", "context": {context}}'}),
        brief=Setup(words=("--brief", "{named}")),
        task=("{prompt}",),
        script=Script(
            read=(("read", {"path": "{file}"}), ("read", {"path": "{other}"})),
            edit=(("edit", {"path": "{file}", "old": "{old}\n", "new": "{new}\n"}),),
        ),
        memory_mib=512,
        processes=64,
    )


def installed(folder: Path) -> Path:
    """Write the toy agent as a program, and return its path."""
    program = folder / "toy"
    program.write_text(f"#!{sys.executable} -S\n{TOY.read_text()}")
    program.chmod(0o755)
    return program
