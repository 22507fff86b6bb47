"""What is different on Linux and elsewhere; elsewhere is played by telling agentrl that it is on macOS."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import agentrl
from agentrl.core import operating_system, sandboxes
from agentrl.core.errors import ConfigError, SandboxError
from agentrl.core.process import cuda_device_count, free_port
from agentrl.env.isolation import launcher, leftovers, system
from agentrl.env.isolation.system import ProcessLimits
from agentrl.env.sandbox import local, reaper
from tests.processes import still_runs

ROOT = Path(agentrl.__file__).parent
ONLY_HERE = re.compile(r"/proc/|prctl|/dev/shm|sys\.platform|platform\.system|sched_getaffinity|malloc_trim|adjtimex|/sys/fs/cgroup")
LINUX_ONLY = {
    "core/operating_system.py": "the differences",
    "env/isolation/": "limits of processes, which have differences of their own; the rest is refused elsewhere (--env-isolation)",
    "env/sandbox/": "bubblewrap and cgroups; refused elsewhere (--sandbox local)",
}


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "SYSTEM", "darwin")
    monkeypatch.setattr(launcher, "LINUX", False)


def test_what_only_linux_has_is_in_one_place() -> None:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        lines = [line for line in path.read_text().splitlines() if ONLY_HERE.search(line) and not line.lstrip().startswith(("#", '"""'))]
        if lines and not name.startswith(tuple(LINUX_ONLY)):
            found[name] = lines
    assert found == {}


def test_elsewhere_the_kernel_is_not_asked(macos: None) -> None:
    assert not operating_system.on_linux()
    assert operating_system.told_by_kernel("self/stat") == ""
    assert operating_system.container_limit("memory.max") is None
    assert operating_system.nvidia_devices() == 0
    assert operating_system.first_outgoing_port() == 0
    assert operating_system.waited_for_cpu_s() == 0.0
    assert operating_system.clock_is_kept() is None
    assert operating_system.usable_cores() == os.cpu_count()
    assert operating_system.memory_root() != Path("/dev/shm")
    assert operating_system.held_alone_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert free_port("127.0.0.1") > 0
    assert cuda_device_count() >= 0


def test_on_linux_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "SYSTEM", "linux")
    assert operating_system.told_by_kernel("self/stat").startswith(f"{os.getpid()} ")
    assert operating_system.usable_cores() == len(os.sched_getaffinity(0))
    assert operating_system.first_outgoing_port() > 1024
    assert 0 < operating_system.held_alone_bytes() < psutil.Process().memory_info().rss


def test_open_files_are_known_elsewhere_too(macos: None, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w"):
        assert str(tmp_path / "open") in operating_system.open_paths(os.getpid())


def test_bubblewrap_is_for_linux_even_where_a_program_has_its_name(macos: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not sandboxes.has_holder("local")
    assert sandboxes.has_holder("container")
    with pytest.raises(SandboxError, match="needs the program bwrap"):
        local.check_local.__wrapped__()
    with pytest.raises(ConfigError, match="needs Linux, and this is darwin"):
        operating_system.require_linux("--env-isolation", "process", "Leave it out.")


CHILD = """
import os, sys, time
from agentrl.core.operating_system import end_with_parent
if sys.argv[1] == "parent":
    import subprocess
    child = subprocess.Popen([sys.executable, __file__, str(os.getpid())])
    print(child.pid, flush=True)
    time.sleep(60)
end_with_parent(int(sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["linux", "darwin"])
def test_a_process_ends_with_its_parent(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    environment = {**os.environ, "AGENTRL_ASSUME_SYSTEM": name}
    with subprocess.Popen([sys.executable, script, "parent"], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)
        assert child.is_running()
        parent.kill()
    deadline = time.monotonic() + 10.0
    while still_runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not still_runs(child)


def test_processes_are_listed_and_ended_without_proc(macos: None) -> None:
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "MARKED": "elsewhere"})
    try:
        while not leftovers.command_line(program.pid).endswith("time.sleep(60)"):
            time.sleep(0.01)
        info = system.processes()[program.pid]
        assert (info.parent, info.state in "RSD", info.resident > 2**20) == (os.getpid(), True, True)
        assert program.pid in launcher.children(os.getpid())
        assert system.marked("MARKED=elsewhere") == {program.pid}
        assert system.marked("MARKED=other") == set()
        system.kill_families([program.pid])
        assert program.wait(10) == -signal.SIGKILL
    finally:
        program.kill()
        program.wait()


def test_what_any_thread_of_a_program_started_descends_from_it() -> None:
    start = "lambda: print(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    code = f"import subprocess, threading; threading.Thread(target={start}).start(); input()"
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        started = int(program.stdout.readline())
        assert {program.pid, started} <= set(launcher._descendants())
        assert system.processes()[started].parent == program.pid
    finally:
        system.kill_families([program.pid])
        program.wait()


def test_a_program_without_a_wall_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_ASSUME_SYSTEM", "darwin")  # read by the program of its own that starts another
    told = "import resource as r; print(1 + 1, *(r.getrlimit(kind)[0] for kind in (r.RLIMIT_FSIZE, r.RLIMIT_CPU)))"
    code = (
        "import os, sys\nfrom agentrl.env.isolation import launcher\nread, write = os.pipe()\n"
        f"launcher.main({asdict(ProcessLimits(cpu_s=2.0, file_mib=3))}, 0, write, 0, [sys.executable, '-c', {told!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == [2, 3 * 2**20, pytest.approx(3, abs=2)]


def test_containers_are_removed_when_none_is_being_made(tmp_path: Path) -> None:
    owner, engine = "machine:/folder", tmp_path / "engine"
    seen = "pgrep -f 'made for [m]achine:/folder' > /dev/null && made=' too early'"
    engine.write_text(f'#!/bin/sh\n{seen}\necho "$1$made" >> {tmp_path}/said\necho 7\n')
    engine.chmod(0o700)
    making = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)", f"{reaper.OWNER}={owner}", f"made for {owner}"])
    while not reaper._is_making(owner):
        time.sleep(0.005)
    assert reaper.remove_containers([str(engine)], owner)
    assert (tmp_path / "said").read_text() == "ps\nrm\n"
    assert making.wait(10) == 0


def test_containers_that_are_being_made_are_seen_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    label = f"{reaper.OWNER}=machine:/folder"
    making = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", label])
    try:
        for is_dir in (os.path.isdir, lambda path: False):
            monkeypatch.setattr(reaper.os.path, "isdir", is_dir)
            deadline = time.monotonic() + 5.0
            while not reaper._is_making("machine:/folder") and time.monotonic() < deadline:
                time.sleep(0.02)
            assert reaper._is_making("machine:/folder")
            assert not reaper._is_making("machine:/fold")
    finally:
        making.kill()
        making.wait()
