"""The documentation: commands of console blocks run, Python blocks run, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pipeplan
from command_line import run_command

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN_PAGES = (
    "first-steps.md",
    "failures.md",
    "memory.md",
    "my-cluster.md",
    "schedules.md",
    "sweeps.md",
)
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
YAML_NAMES = {
    "first-steps.md": "two-hosts.yaml",
    "my-cluster.md": "mine.cluster.yaml",
    "sweeps.md": "cases.yaml",
}
"""The file that a page's YAML block is to be saved as."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the text of each fenced block."""
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


@pytest.mark.parametrize("name", RUN_PAGES)
def test_what_a_page_tells_to_type_works(name, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language, text in blocks(DOCS / name):
        if language == "yaml":
            Path(YAML_NAMES[name]).write_text(text)
        elif language == "python":
            exec(compile(text, name, "exec"), {})  # noqa: S102  # our own page
        elif language == "console":
            _run(text, capfd)


def _run(text: str, capfd) -> None:
    """Run each line; a comment below it names another exit code than 0."""
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("#"):
            continue
        program, *arguments = shlex.split(line)
        assert program == "pipeplan"
        expected = re.match(r"# exit (\d+): (.*)", below)
        code, _, err = run_command(capfd, *arguments)
        assert code == (int(expected[1]) if expected else 0), f"{line}: {err}"
        if expected:
            assert expected[2] in err


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown readers make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r"[ ]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_no_link_is_dead(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name}: {target}"


def test_every_public_name_has_its_place_in_the_reference():
    listed = re.findall(r"^::: pipeplan\.([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    names = {path.rpartition(".")[2] for path in listed}
    assert names >= set(pipeplan.__all__) - {"__version__", "zoo"}


def test_every_benchmark_is_listed():
    listed = (DOCS / "benchmarks.md").read_text()
    folders = [path.parent.name for path in (ROOT / "benchmarks").glob("*/README.md")]
    assert [name for name in folders if f"`benchmarks/{name}`" not in listed] == []


def test_every_page_is_in_the_contents():
    contents = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES if f": {page.name}" not in contents] == []


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pages = [path.read_text() for path in tmp_path.glob("*.html")]
    assert len(pages) > len(PAGES)
    assert not any(
        re.search(r"src=\"https?://|href=\"https?://[^\"]*\.(js|css|woff2?)\"", page)
        for page in pages
    )
