"""Ten tasks in the form of Harbor, written into a folder; their images are built on one of Debian's packages."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.sandboxes import IMAGE, container_engine, has_image, image_of

REWARD = "mkdir -p /logs/verifier; if {0}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
SHORT = "[agent]\ntimeout_sec = 60.0\n\n[verifier]\ntimeout_sec = 60.0\n"


@dataclass(frozen=True, kw_only=True)
class Example:
    """One task: lines of its Dockerfile, what the agent is told, the solution, a shell condition for the reward, and other files."""

    name: str
    run: str
    told: str
    solve: str
    holds: str
    config: str = SHORT
    files: dict[str, str] = field(default_factory=dict)
    test: str = ""


EXAMPLES = (
    Example(
        name="count-lines",
        run="RUN seq 1 37 > /srv/numbers.txt",
        told="Write the number of lines of /srv/numbers.txt to count.txt.",
        solve="wc -l < /srv/numbers.txt > count.txt",
        holds='[ "$(tr -d " " < /app/count.txt 2>/dev/null)" = 37 ]',
    ),
    Example(
        name="sort-words",
        run="RUN printf 'pear\\nfig\\nplum\\n' > words.txt",
        told="Sort the lines of words.txt in place.",
        solve="sort -o words.txt words.txt",
        holds='[ "$(head -n 1 /app/words.txt)" = fig ]',
    ),
    Example(
        name="fix-script",
        run="COPY add.py /app/add.py\nRUN chmod +x add.py && ! python3 add.py 1 2",
        told="add.py should print the sum of its two arguments. Repair it.",
        solve="sed -i 's/sys.arg\\b/sys.argv/' add.py",
        holds='[ "$(python3 /app/add.py 20 22 2>/dev/null)" = 42 ]',
        files={"environment/add.py": "import sys\n\nprint(sum(map(int, sys.arg[1:])))\n"},
    ),
    Example(
        name="make-user",
        run="RUN ! id builder",
        told="Add a user called builder to this machine.",
        solve="useradd builder",
        holds="id builder > /dev/null 2>&1",
    ),
    Example(
        name="old-logs",
        run="RUN mkdir -p /var/log/app && touch -d 2020-01-01 /var/log/app/old.log && touch /var/log/app/new.log",
        told="Remove the files of /var/log/app that are older than a year.",
        solve="find /var/log/app -type f -mtime +365 -delete",
        holds="[ -e /var/log/app/new.log ] && ! [ -e /var/log/app/old.log ]",
    ),
    Example(
        name="variable",
        run="ENV SECRET_WORD=heron\nRUN echo built",
        told="Write the value of the variable SECRET_WORD to word.txt.",
        solve="printenv SECRET_WORD > word.txt; printenv WANTED > /logs/artifacts/wanted.txt",
        holds='[ "$(cat /app/word.txt 2>/dev/null)" = "$EXPECTED" ]',
        config=SHORT + '\n[verifier.env]\nEXPECTED = "heron"\n\n[environment.env]\nWANTED = "${HOME:-none}"\n',
    ),
    Example(
        name="parts",
        run="RUN echo 3 > a && echo 4 > b",
        told="Write the sum of the numbers in a and b to sum.txt.",
        solve="echo $(( $(cat a) + $(cat b) )) > sum.txt",
        holds="",
        test='right=$([ "$(cat /app/sum.txt 2>/dev/null)" = 7 ] && echo 1 || echo 0)\n'
        'echo "{\\"reward\\": $right, \\"is_there\\": $([ -e /app/sum.txt ] && echo 1 || echo 0)}" > /logs/verifier/reward.json',
    ),
    Example(
        name="separate",
        run="RUN echo 12 > n",
        told="Write the square of the number in n to /app/out/square.txt.",
        solve="mkdir -p out && echo $(( $(cat n) * $(cat n) )) > out/square.txt",
        holds='[ "$(cat /app/out/square.txt 2>/dev/null)" = 144 ] && ! [ -e /app/trap ]',
        config='artifacts = ["/app/out"]\n\n' + SHORT + 'environment_mode = "separate"\n',
    ),
    Example(
        name="compose",
        run="RUN mkdir -p /book && echo one two three > /book/text",
        told="Write the number of words in text to words.",
        solve="wc -w < text > words",
        holds='[ "$(tr -d " " < /book/words 2>/dev/null)" = 3 ]',
        files={
            "environment/docker-compose.yaml": "services:\n  main:\n    build: .\n    working_dir: /book\n    environment:\n      A: b\n"
        },
    ),
    Example(
        name="own-verifier",
        run="RUN echo 5 > n",
        told="Write twice the number in n to /app/double.txt.",
        solve="echo $(( 2 * $(cat n) )) > double.txt",
        holds="",
        config='artifacts = ["/app/double.txt"]\n\n' + SHORT + "\n[verifier.environment]\nmemory_mb = 512\n",
        files={
            "tests/Dockerfile": f"FROM {IMAGE}\nCOPY test.sh /tests/test.sh\nRUN echo 10 > /expected\n",
        },
        test="cmp -s /app/double.txt /expected && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
    ),
)


def write_tasks(folder: Path) -> Path:
    """Write all tasks below a folder, and return it."""
    for example in EXAMPLES:
        test = example.test or REWARD.format(example.holds)
        files = {
            "instruction.md": example.told,
            "task.toml": f'version = "1.0"\n{example.config}' if "artifacts" not in example.config else example.config,
            "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n{example.run}\n",
            "solution/solve.sh": f"#!/bin/bash\nset -e\n{example.solve}\n",
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
            **example.files,
        }
        for name, text in files.items():
            path = folder / example.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            own = f"# For {folder}.\n" if path.name == "Dockerfile" else ""  # other runs of these tests remove images of the same content
            path.write_text(own + text)
    return folder


def tasks_with_images(folder: Path) -> Iterator[Path]:
    """Write all tasks below a folder, and in the end remove the images that were built of them."""
    engine, folder = container_engine(), write_tasks(folder)
    boxes = [file.parent for file in folder.rglob("Dockerfile")]
    yield folder
    names = [name for name in map(image_of, boxes) if has_image(engine, name)]
    subprocess.run([*engine.program, "rmi", "--force", *names], capture_output=True, check=False)
