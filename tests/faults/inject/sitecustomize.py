"""Makes a run misbehave. Python imports this file at start when its folder is on PYTHONPATH.

``AGENTRL_TEST_FAULTS`` says how, as ``name=value,name=value``; ``AGENTRL_TEST_FOLDER`` is where the faults leave notes.
A class is changed right after its module was imported, so nothing is imported that the run would not import.
A method is changed only through `DOORS`, which tests/unit/project/test_injections.py compares with the code in ``make test``.
"""

import asyncio
import functools
import importlib.abc
import importlib.util
import inspect
import json
import os
import sys
import time

FAULTS = dict(part.split("=") for part in os.environ.get("AGENTRL_TEST_FAULTS", "").split(",") if part)
FOLDER = os.environ.get("AGENTRL_TEST_FOLDER", "")


def first(name):
    """Whether this process is the first to ask: a fault that hits one process of several."""
    try:
        os.close(os.open(f"{FOLDER}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(name, **facts):
    with open(f"{FOLDER}/{name}.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **facts}) + "\n")


def train(method, self, step, *groups):
    note("training", step=step, groups=[group.group_id for group in groups])
    time.sleep(float(FAULTS.get("slow_train", 0)))
    return method(self, step, *groups)


def save_checkpoint(method, self, path, step):
    if step == int(FAULTS.get("full_disk_at", -1)):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return method(self, path, step)


async def load_weights(method, self, update):
    if "slow_load" in FAULTS:
        note("loading", version=update.version)
        await asyncio.sleep(float(FAULTS["slow_load"]))
    version = await method(self, update)
    if update.version == int(FAULTS.get("half_load", -1)) and first("half_load"):
        note("half_load", engine=self._settings.index)
        raise RuntimeError("injected: the second half of the weights was lost")
    return version


seen = []
hung = []


async def sample(method, self, request):
    seen.append(request)
    if len(seen) == int(FAULTS.get("never_generate", -1)) and first("never_generate"):
        note("never_generate", engine=self._settings.index)
        hung.append(self)
    if self in hung:
        await asyncio.sleep(10_000)
    return await method(self, request)


def put_file(method, self, path1, path2, callback=None, **kwargs):
    if "upload_mb_per_s" in FAULTS:
        time.sleep(os.path.getsize(path1) / 1e6 / float(FAULTS["upload_mb_per_s"]))
    return method(self, path1, path2, callback, **kwargs)


# Module -> class, method -> what takes its place; its parameters but the first are those of the method.
DOORS = {
    "agentrl.learner.learner": {("LearnerRank", "train"): train, ("LearnerRank", "save_checkpoint"): save_checkpoint},
    "agentrl.engine.vllm_engine": {("VllmEngine", "_load_weights"): load_weights, ("VllmEngine", "_sample"): sample},
    "fsspec.implementations.local": {("LocalFileSystem", "put_file"): put_file},
}


def open_doors(module):
    """Change the methods of a module that `DOORS` names.

    Raises:
        TypeError: If the module has no such method of its own, or one with other parameters.
    """
    for (owner, name), act in DOORS[module.__name__].items():
        method = vars(getattr(module, owner, object)).get(name)
        wanted = list(inspect.signature(act).parameters)[1:]
        if method is None or list(inspect.signature(method).parameters) != wanted:
            raise TypeError(f"{module.__name__}.{owner} has no {name}({', '.join(wanted)}): correct {__file__}")
        setattr(getattr(module, owner), name, around(method, act))


def around(method, act):
    """A method that calls `act` with the method whose place it takes."""

    @functools.wraps(method)
    def changed(*args, **kwargs):
        return act(method, *args, **kwargs)

    return changed


if "slow_fsync" in FAULTS:
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(float(FAULTS["slow_fsync"]))
        fsync(descriptor)

    os.fsync = slow_fsync


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in DOORS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            open_doors(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    sys.meta_path.insert(0, Finder())
