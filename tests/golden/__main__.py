"""Commands: ``python -m tests.golden write`` records all cases anew; ``check`` compares them with the golden ones; ``show`` prints some.

Names of cases may stand behind, with ``*`` for any text; then only these are looked at, and nothing is written.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Iterator, Sequence

from tests.golden.cases import Case, all_cases
from tests.golden.compare import compare, is_dropped, listed
from tests.golden.record import Recorder
from tests.golden.storage import GOLDEN, read, write
from tests.golden.values import flat


def results(cases: Sequence[Case]) -> Iterator[tuple[str, str, object]]:
    """Yield the recording of each case, with its name and its command."""
    recorder = Recorder()
    try:
        for case in cases:
            yield case.name, case.words[0], recorder.record(case)
    finally:
        recorder.close()


def check(cases: Sequence[Case]) -> int:
    """Print the differences between new recordings and the golden ones; return how many cases differ."""
    golden, differ = dict(read()), 0
    for name, _, result in results(cases):
        differences = compare(golden[name], flat(result)) if name in golden else ["the case is not recorded"]
        if differences:
            differ += 1
            print(listed(name, differences))
    return differ


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("command", choices=("write", "check", "show"))
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    begin, cases = time.monotonic(), all_cases()
    if arguments.command == "check":
        cases = [case for case in cases if not is_dropped(case.name)]
    if arguments.names:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, name) for name in arguments.names)]
    code = 0
    if arguments.command == "show" or (arguments.command == "write" and arguments.names):
        for name, _, result in results(cases):
            print(json.dumps({name: result}, indent=1))
    elif arguments.command == "write":
        write(GOLDEN, results(cases))
    else:
        code = check(cases)
    sys.stderr.write(f"{len(cases)} cases in {time.monotonic() - begin:.0f} s\n")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
