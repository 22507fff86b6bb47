"""Write the hashes of pinned packages, for which uv asks the package index: ``python -m tests.pin_hashes requirements/cpu.txt ...``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename

PIN = re.compile(r"^(?P<name>[\w.-]+)==\S+")
ASK = (
    *("uv", "pip", "compile", "--quiet", "--no-config", "--no-python-downloads", "--no-deps", "--no-header", "--no-annotate"),
    *("--universal", "--python-version", "3.11.9", "--format", "pylock.toml"),
)
PYTHONS = range(11, 15)
"""Minor versions of Python 3 whose wheels get their hashes written."""


def main(words: Sequence[str]) -> int:
    """Rewrite the named files, each pin followed by the hashes of the files that may be installed for it."""
    options, files = [word for word in words if not word.endswith(".txt")], [Path(word) for word in words if word.endswith(".txt")]
    for path in files:
        pins = pins_of(path.read_text())
        path.write_text(with_hashes(pins, locked(pins, options)))
    return 0


def pins_of(text: str) -> list[str]:
    """Return the lines of a file of requirements without the hashes in it."""
    return [line.removesuffix(" \\") for line in text.splitlines() if not line.startswith("    --hash=")]


def with_hashes(lines: Iterable[str], hashes: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a file whose lines are given, with the hashes of each package by its name."""
    written = []
    for line in lines:
        pin = PIN.match(line)
        known = hashes[canonicalize_name(pin["name"])] if pin else ()
        written.append(" \\\n".join([line, *(f"    --hash=sha256:{digest}" for digest in known)]))
    return "\n".join(written) + "\n"


def locked(lines: Iterable[str], options: Sequence[str]) -> dict[str, list[str]]:
    """Return the hashes that the index has for each pinned package; where no wheel fits, that of the source."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        asked.write_text("\n".join(lines))
        subprocess.run([*ASK, *options, str(asked), "--output-file", str(answer)], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(answer.read_text())["packages"]
    return {package["name"]: sorted(_hashes(package)) for package in packages}


def _hashes(package: Mapping[str, Any]) -> list[str]:
    wheels = [wheel["hashes"]["sha256"] for wheel in package.get("wheels", ()) if suits(wheel["url"].rpartition("/")[2])]
    return wheels or [package["sdist"]["hashes"]["sha256"]]


def suits(wheel: str) -> bool:
    """Return True if a wheel of this file name can be installed on Linux x86-64 by a supported CPython."""
    _, _, _, tags = parse_wheel_filename(wheel.replace("%2B", "+"))
    return any(_fits(tag.interpreter, tag.abi, tag.platform) for tag in tags)


def _fits(interpreter: str, abi: str, platform: str) -> bool:
    if platform != "any" and not re.fullmatch(r"(many)?linux\w*_x86_64", platform):
        return False
    if re.fullmatch(r"py3\d*", interpreter):
        return True
    version = re.fullmatch(r"cp3(\d+)", interpreter)
    return version is not None and (abi == "abi3" or (int(version[1]) in PYTHONS and abi in ("none", interpreter)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
