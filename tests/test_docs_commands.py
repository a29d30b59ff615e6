"""Every command of README and docs runs as it stands there, and prints what the page shows.

Each page gets a folder of its own with the files that it speaks of. A few commands need several
processes or hosts; a table says which test runs those.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import pipeplan as pp
from command_line import run_command
from interop import foreign_files, topologies

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:\$ )?((?:pipeplan|torchrun|python|make|pip) .*)")
COMMENT = re.compile(r"\s+# .*$")
ELSEWHERE = {
    "pip install": ("tests/test_wheel.py", "pip"),
    "make ": ("tests/test_docs.py", "mkdocs"),
    "pipeplan calibrate": ("tests/runtime/test_tutorial.py", "tutorial"),
    "pipeplan profile": ("tests/measure/test_profile_command.py", "--estimate"),
    "pipeplan plan text.model.json": ("tests/measure/test_measuring_page.py", "text.model.json"),
    "torchrun --nproc-per-node 2 ": ("tests/measure/test_measuring_page.py", "torchrun"),
    "pipeplan testbed": ("tests/testbed", '"testbed"'),
    "torchrun --nproc-per-node 4 -m pipeplan.run": ("tests/runtime", "pipeplan.run"),
    "torchrun --nproc-per-node 8 -m pipeplan.measure.links": ("tests/measure", "measure.links"),
    "torchrun --nproc-per-node 4 -m pipeplan.measure.links": ("tests/measure", "measure.links"),
    "torchrun --nnodes 4 ": ("tests/measure", "measure.links"),
    "pipeplan discover -o": ("tests/interop/test_discovery.py", "nvidia-smi"),
    "pipeplan discover --hosts node1": ("tests/interop/test_discovery.py", "--hosts"),
}
"""What needs several processes, other hosts or GPUs: who runs it, and what shows it there."""
OWN_TEST = {
    "tutorial.md": "tests/runtime/test_tutorial.py",
    **dict.fromkeys(
        (
            "first-steps.md",
            "failures.md",
            "memory.md",
            "my-cluster.md",
            "schedules.md",
            "sweeps.md",
        ),
        "tests/test_docs.py",
    ),
}
REFUSED = {"--to megatron": 3, "wrong.csv": 2}
"""Commands that a page shows being refused, by their end, and the exit code."""


def test_pages_with_a_test_of_their_own():
    for page, test in OWN_TEST.items():
        assert page in (ROOT / test).read_text()


@pytest.mark.parametrize(("where", "marker"), sorted(set(ELSEWHERE.values())))
def test_what_runs_elsewhere_does(where, marker):
    place = ROOT / where
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    assert any(marker in path.read_text() for path in files)


def shown_after(page: Path) -> dict[str, list[str]]:
    """What a page shows below each command that has a prompt, without lines that are cut off."""
    shown: dict[str, list[str]] = {}
    for _, body in FENCE.findall(page.read_text()):
        for part in re.split(r"^\$ ", body.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            kept = [line for line in lines if line.strip() and "..." not in line]
            shown[COMMENT.sub("", command)] = kept
    return shown


def commands_of(page: Path) -> list[str]:
    """The commands of a page without their comments, in order."""
    found = []
    text = page.read_text()
    for _, body in FENCE.findall(text):
        for line in body.replace("\\\n", " ").splitlines():
            match = COMMAND.match(line.strip())
            if match:
                found.append(COMMENT.sub("", match[1]))
    return found


PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    if page.name not in OWN_TEST and commands_of(page)
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that pages speak of."""
    folder = tmp_path_factory.mktemp("made")
    plan = pp.plan(pp.zoo.model("bert-large"), pp.zoo.cluster("4x2-10g"), microbatches=16)
    pp.write_plan(plan, folder / "bert.plan.json")
    shutil.copy(ROOT / "examples" / "families.plan.json", folder / "family.plan.json")
    texts = {
        "graph.txt": foreign_files.PIPEDREAM,
        "trace.json": foreign_files.TRACE,
        "topo.txt": topologies.DGX_H100,
        "nvlink.txt": topologies.NVLINKS_H100,
        "memory.csv": topologies.MEMORY_H100,
        "cases.yaml": dict(FENCE.findall((DOCS / "sweeps.md").read_text()))["yaml"],
        "1f1b.csv": one_f_one_b(4, 16),
        "wrong.csv": one_f_one_b(4, 16).replace("3F1,3B1,3F2,3B2", "3F2,3B2,3F1,3B1"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def one_f_one_b(num_stages: int, num_microbatches: int) -> str:
    """1F1B as torch reads it, one action a cell."""
    lines = []
    for stage in range(num_stages):
        ahead = num_stages - stage
        order = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(num_microbatches):
            order.append(f"{stage}B{m}")
            if ahead + m < num_microbatches:
                order.append(f"{stage}F{ahead + m}")
        lines.append(",".join(order))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page(page, made, capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for path in made.iterdir():
        shutil.copy(path, tmp_path)
    shown = shown_after(page)
    for line in commands_of(page):
        if any(line.startswith(start) for start in ELSEWHERE):
            continue
        program, *arguments = shlex.split(line)
        assert program == "pipeplan", line
        code, out, err = run_command(capfd, *arguments)
        expected = next((code for end, code in REFUSED.items() if line.endswith(end)), 0)
        assert code == expected, f"{line}: {err}"
        said = [in_short(text) for text in (out + err).splitlines()]
        for text in shown.get(line, []):
            assert in_short(text) in said, f"{line}\n{text}\n{out}{err}"


def in_short(text: str) -> str:
    """The words of a line. Figures are those of the day that the page names."""
    return " ".join(re.sub(r"[-+]?\d[\d.e+-]*", "#", text).split())
