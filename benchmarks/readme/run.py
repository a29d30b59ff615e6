"""Writes anew what the README shows: the outputs of two commands, and the picture of the plan.

`python benchmarks/readme/run.py` after a change that changes plans. `tests/test_readme_example.py`
fails where the README shows another plan than the planner makes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "demo.svg"
EXAMPLE = ("bert-large", "4x2-10g")
SHOWN = (("plan", *EXAMPLE), ("compare", *EXAMPLE))


def output_of(*arguments: str) -> str:
    """What the command prints in a terminal of 80 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeplan", *arguments],
        env={**os.environ, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines()) + "\n"


def block_after(command: str) -> re.Pattern[str]:
    """The first block without a language behind the place where the text names the command."""
    return re.compile(
        rf"(`pipeplan {re.escape(command)}`.*?^```\n)(.*?)(^```)", re.DOTALL | re.MULTILINE
    )


def main() -> None:
    text = README.read_text()
    for arguments in SHOWN:
        output = output_of(*arguments)
        text, count = block_after(" ".join(arguments)).subn(
            lambda match, output=output: match[1] + output + match[3], text, count=1
        )
        assert count == 1, f"the README does not name {arguments}"
    README.write_text(text)
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "bert.plan.json")
        output_of("plan", *EXAMPLE, "-o", path)
        output_of("plot", path, "-o", str(PICTURE))


if __name__ == "__main__":
    main()
