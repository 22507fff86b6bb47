"""The process that ends a cluster after its driver spares the one that removes containers."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

from agentrl.cluster.reaper import MARK, members
from agentrl.env.sandbox import reaper


def test_the_process_that_removes_containers_is_spared() -> None:
    mark = uuid.uuid4().hex
    words = [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(60)"]
    begun = [
        subprocess.Popen([*words, *more], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE) for more in ([], [str(reaper.__file__)])
    ]
    try:
        for process in begun:
            assert process.stdout is not None
            process.stdout.readline()
        assert [process.pid for process in members(mark, [])] == [begun[0].pid]
    finally:
        for process in begun:
            process.kill()
            process.communicate()
