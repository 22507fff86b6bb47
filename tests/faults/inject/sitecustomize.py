"""Makes a run misbehave. Python imports this file at start when its folder is on PYTHONPATH.

``AGENTRL_TEST_FAULTS`` says how, as ``name=value,name=value``; ``AGENTRL_TEST_FOLDER`` is where the faults leave notes.
A class of the product is changed right after its module was imported, so nothing is imported that the run would not import.
"""

import functools
import importlib.abc
import importlib.util
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


def before(owner, name, act):
    """Do something before a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def changed(self, *args, **kwargs):
        act(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(owner, name, changed)


def learner(module):
    slow_s = float(FAULTS.get("slow_train", 0))
    full_at = int(FAULTS.get("full_disk_at", -1))

    def train(self, step, *groups):
        note("training", step=step, groups=[group.group_id for group in groups])
        time.sleep(slow_s)

    def save(self, path, step):
        note("saving", step=step)
        if step == full_at:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    before(module.LearnerRank, "train", train)
    before(module.LearnerRank, "save_checkpoint", save)


def engine(module):
    half_load = int(FAULTS.get("half_load", -1))
    never = int(FAULTS.get("never_generate", -1))
    load, generate, seen = module.VllmEngine._replace_weights, module.VllmEngine._final_output, []

    async def changed_load(self, llm, update):
        if "slow_load" in FAULTS:
            import asyncio

            note("loading", version=update.version)
            await asyncio.sleep(float(FAULTS["slow_load"]))
        if update.version == half_load and first("half_load"):
            note("half_load", engine=self._settings.index)
            await load(self, llm, update)
            raise RuntimeError("injected: the second half of the weights was lost")
        return await load(self, llm, update)

    async def changed_generate(self, llm, request, *rest):
        seen.append(request)
        if len(seen) == never and first("never_generate"):
            note("never_generate", engine=self._settings.index)
            module.VllmEngine.hung = True
        if getattr(module.VllmEngine, "hung", False):
            import asyncio

            await asyncio.sleep(10_000)
        return await generate(self, llm, request, *rest)

    module.VllmEngine._replace_weights, module.VllmEngine._final_output = changed_load, changed_generate


def remote(module):
    rate, put = float(FAULTS.get("upload_mb_per_s", 0)), module._put

    def slow_put(path, address, name, size):
        note("uploading", file=f"{address}/{name}")
        if rate:
            time.sleep(size / 1e6 / rate)
        put(path, address, name, size)

    module._put = slow_put


PATCHES = {"agentrl.learner.learner": learner, "agentrl.engine.vllm_engine": engine, "agentrl.core.remote": remote}

if "slow_fsync" in FAULTS:
    fsync = os.fsync

    def slow_fsync(descriptor):
        time.sleep(float(FAULTS["slow_fsync"]))
        fsync(descriptor)

    os.fsync = slow_fsync


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module
        return spec


if FAULTS:
    sys.meta_path.insert(0, Finder())
