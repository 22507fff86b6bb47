"""Packages installed into a folder, as far as `importlib.metadata` looks: modules, and a ``*.dist-info`` with entry points."""

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, package: str, modules: Mapping[str, str], schemes: Mapping[str, str], group: str = "agentrl.suites") -> None:
    """Write a package's modules, and declare its schemes in a group of entry points."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    points = "".join(f"{scheme} = {value}\n" for scheme, value in schemes.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{points}")
