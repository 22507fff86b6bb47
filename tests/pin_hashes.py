"""Write the hashes of pinned packages, for which uv asks the package index: ``python -m tests.pin_hashes requirements/cpu.txt ...``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
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
X86, ARM, MAC = r"(many)?linux\w*_x86_64", r"(many)?linux\w*_aarch64", r"macosx_\d+_\d+_(arm64|universal2)"
EVERYWHERE = (X86, ARM, MAC)
PLATFORMS = {"torch.txt": (X86,), "torch-arm64.txt": (ARM, MAC), "vllm.txt": (X86,), "gpu.txt": (X86,)}
"""Platforms of a file's wheels, as patterns of their tags, where these are not all."""


def main(words: Sequence[str]) -> int:
    """Rewrite the named files, each pin followed by the hashes of the files that may be installed for it."""
    options, files = [word for word in words if not word.endswith(".txt")], [Path(word) for word in words if word.endswith(".txt")]
    for path in files:
        pins = pins_of(path.read_text())
        path.write_text(with_hashes(pins, locked(pins, options, PLATFORMS.get(path.name, EVERYWHERE))))
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


def locked(lines: Iterable[str], options: Sequence[str], platforms: Collection[str]) -> dict[str, list[str]]:
    """Return the hashes that the index has for each pinned package."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "pins.txt"), Path(folder, "pylock.toml")
        asked.write_text("\n".join(lines))
        subprocess.run([*ASK, *options, str(asked), "--output-file", str(answer)], check=True)
        packages: list[dict[str, Any]] = tomllib.loads(answer.read_text())["packages"]
    return {package["name"]: sorted(hashes_of(package, platforms)) for package in packages}


def hashes_of(package: Mapping[str, Any], platforms: Collection[str]) -> set[str]:
    """Return the hashes of the wheels for some platforms, and of the source if one of them has no wheel."""
    wheels = {wheel["url"].rpartition("/")[2]: wheel["hashes"]["sha256"] for wheel in package.get("wheels", ())}
    found = {digest for name, digest in wheels.items() if suits(name, platforms)}
    if "sdist" in package and not all(any(suits(name, (platform,)) for name in wheels) for platform in platforms):
        found.add(package["sdist"]["hashes"]["sha256"])
    return found


def suits(wheel: str, platforms: Collection[str] = EVERYWHERE) -> bool:
    """Return True if a wheel of this file name can be installed on one of some platforms by a supported CPython."""
    _, _, _, tags = parse_wheel_filename(wheel.replace("%2B", "+"))
    return any(_fits(tag.interpreter, tag.abi, tag.platform, platforms) for tag in tags)


def _fits(interpreter: str, abi: str, platform: str, platforms: Collection[str]) -> bool:
    if platform != "any" and not any(re.fullmatch(pattern, platform) for pattern in platforms):
        return False
    if re.fullmatch(r"py3\d*", interpreter):
        return True
    version = re.fullmatch(r"cp3(\d+)", interpreter)
    return version is not None and (abi == "abi3" or (int(version[1]) in PYTHONS and abi in ("none", interpreter)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
