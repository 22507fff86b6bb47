"""Commands: ``python -m tests.golden write`` records cases anew; ``check`` compares them with the golden ones; ``show`` prints them.

Names of cases may stand behind, with ``*`` for any text; then only these are recorded, and all others stay as they are.
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
from tests.golden.storage import GOLDEN, Fields, read, write
from tests.golden.values import flat


def recordings(cases: Sequence[Case]) -> Iterator[tuple[str, str, Fields]]:
    """Yield the recording of each case, with its name and its command."""
    recorder = Recorder()
    try:
        for case in cases:
            yield case.name, case.words[0], flat(recorder.record(case))
    finally:
        recorder.close()


def check(cases: Sequence[Case]) -> int:
    """Print the differences between new recordings and the golden ones; return how many cases differ."""
    golden, differ = dict(read()), 0
    for name, _, fields in recordings(cases):
        differences = compare(golden[name], fields) if name in golden else ["the case is not recorded"]
        if differences:
            differ += 1
            print(listed(name, differences))
    return differ


def renew(cases: Sequence[Case]) -> None:
    """Record some cases anew, and write them with the golden recordings of all others."""
    kept, new = dict(read()), {name: fields for name, _, fields in recordings(cases)}
    known = kept | new
    write(GOLDEN, [(case.name, case.words[0], known[case.name]) for case in all_cases() if case.name in known])


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
    if arguments.command == "show":
        for name, _, fields in recordings(cases):
            print(json.dumps({name: fields}, indent=1))
    elif arguments.command == "write" and arguments.names:
        renew(cases)
    elif arguments.command == "write":
        write(GOLDEN, recordings(cases))
    else:
        code = check(cases)
    sys.stderr.write(f"{len(cases)} cases in {time.monotonic() - begin:.0f} s\n")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
