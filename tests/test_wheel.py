"""The wheel: installed by pip into a fresh environment, elsewhere, without a compiler on the path.

pip builds the wheel from the source distribution, so that builds too. The build tools are those of
this environment; only the third-party packages that pipeplan needs are borrowed from it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.full
USER_SCRIPT = '''
"""A user's script, checked by mypy in strict mode."""

import pipeplan as pp


def slowest_stage(plan: pp.Plan) -> int:
    timeline = pp.simulate(plan)
    ends = [row[-1].end_ms for row in timeline.blocks]
    return max(range(len(ends)), key=lambda stage: ends[stage])


model: pp.ModelProfile = pp.zoo.model("bert-large")
cluster: pp.Cluster = pp.zoo.cluster("4x2-10g")
plan: pp.Plan = pp.plan(model, cluster, microbatches=16, effort=0.1)
found: pp.Comparison = pp.compare(model, cluster, 16, ["spp", "1f1b"])
rows: list[str] = [row.planner for row in found.rows if row.iteration_ms is not None]
bound: pp.Bound | None = plan.bound
verdict: pp.Verdict = pp.check(plan)
stage: pp.Stage = plan.stages[slowest_stage(plan)]
pp.plot(plan, "plan.pdf", font="serif")
pp.write_report(plan, "plan.html", [{"planner": "best"}])
'''


def run(*command: object, cwd: Path, env: dict[str, str] | None = None, seconds: int = 2400) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that was built from the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    backend = "import scikit_build_core.build as b; print(b.build_sdist({!r}))"
    source = run(sys.executable, "-c", backend.format(str(folder)), cwd=ROOT, env=tools).split()[-1]
    with tarfile.open(folder / source) as archive:
        names = archive.getnames()
        assert not [name for name in names if "/.venv/" in name or "/build/" in name]
        archive.extractall(folder, filter="data")
    unpacked = folder / source.removesuffix(".tar.gz")
    options = ("--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, unpacked, cwd=folder, env=tools)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """A fresh environment in another folder; its PATH has neither compiler nor build tools."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    site = next((folder / "env" / "lib").glob("python*")) / "site-packages"
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel, cwd=folder)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    needed = run(python, "-c", REQUIREMENTS, cwd=folder).split()
    for path in {
        Path(run(sys.executable, "-c", WHERE.format(name), cwd=ROOT).strip()) for name in needed
    }:
        (borrowed / path.name).symlink_to(path)
        for more in path.parent.glob(f"{path.stem}*.libs"):
            (borrowed / more.name).symlink_to(more)
    (site / "borrowed.pth").write_text(str(borrowed))
    (folder / "bin").mkdir()
    env = {"PATH": f"{folder / 'env' / 'bin'}:{folder / 'bin'}", "HOME": str(folder)}
    return folder, env


REQUIREMENTS = """
import importlib.metadata, re
names = importlib.metadata.requires("pipeplan")
modules = {"PyYAML": "yaml", "Jinja2": "jinja2", "MarkupSafe": "markupsafe"}
plain = [re.match(r"[A-Za-z0-9_-]+", name)[0] for name in names if "extra ==" not in name]
more = ["_yaml", "markdown_it", "mdurl", "pygments"]  # what these need themselves
print(*[modules.get(name, name) for name in plain], *more)
"""
WHERE = """
import importlib.util, pathlib
spec = importlib.util.find_spec({0!r})
folder = pathlib.Path(spec.origin).parent
print(folder if spec.submodule_search_locations else spec.origin)
"""


def test_the_wheel_holds_what_it_should(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(re.match(r"pipeplan/_core/_kernels.*\.so", name) for name in names)
    for name in ("pipeplan/py.typed", "pipeplan/report/templates/page.html"):
        assert name in names
    assert not [name for name in names if name.endswith((".cpp", ".hpp")) or "tests" in name]


def test_readme_s_first_example_runs_without_a_compiler(clean):
    folder, env = clean
    for program in ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja"):
        assert not any((Path(part) / program).exists() for part in env["PATH"].split(":"))
    example = re.search("```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    run("python", "-c", example, cwd=folder, env=env)
    assert (folder / "bert.html").read_text().startswith("<!DOCTYPE html>")
    out = run("pipeplan", "plan", "bert-large", "4x2-10g", "--effort", "0.1", cwd=folder, env=env)
    assert "bert-large on 4x2-10g" in out
    where = run("python", "-c", "import pipeplan; print(pipeplan.__file__)", cwd=folder, env=env)
    assert str(folder) in where
    assert "--planner" in run("pipeplan", "plan", "--help", cwd=folder, env=env)
    assert run("pipeplan", "schema", "cluster", cwd=folder, env=env).startswith("{")


def test_a_user_s_script_passes_mypy_in_strict_mode(clean):
    """Against the installed wheel, not this checkout."""
    folder, env = clean
    script = folder / "mine.py"
    script.write_text(USER_SCRIPT)
    python = folder / "env" / "bin" / "python"
    found = run(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", python),
        *("--cache-dir", folder / "cache", "--config-file", os.devnull, script),
        cwd=folder,
        env={**env, "MYPYPATH": ""},
    )
    assert "no issues found in 1 source file" in found
    run("python", script, cwd=folder, env=env)


PIP_COMMANDS = ("pip install pipeplan", 'pip install "pipeplan[torch]" transformers')
"""As README and the pages say. There is no index here: pip finds this wheel, and in the environment
all third-party packages of this one."""


@pytest.fixture
def with_packages(tmp_path):
    """A fresh environment that has everything but pipeplan."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    venv.create(tmp_path / "env", with_pip=True)
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for folder in map(Path, sys.path):
        for path in folder.glob("*") if folder.name == "site-packages" else []:
            if re.match(r"_?_?(pipeplan|editable|pip\b|pip-|pycache)|.*\.pth$", path.name):
                continue
            if not (borrowed / path.name).exists():
                (borrowed / path.name).symlink_to(path)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    for old in site.glob("setuptools*"):  # of the Python that made it; torch wants a newer one
        shutil.rmtree(old)
    (site / "borrowed.pth").write_text(str(borrowed))
    return tmp_path


@pytest.mark.parametrize("command", PIP_COMMANDS)
def test_pip_installs_the_wheel_by_its_name(command, wheel, with_packages):
    folder = with_packages
    env = {
        "PATH": f"{folder / 'env' / 'bin'}:/usr/bin:/bin",
        "HOME": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheel.parent),
    }
    run("sh", "-c", command, cwd=folder, env=env)
    where = run("python", "-c", "import pipeplan; print(pipeplan.__file__)", cwd=folder, env=env)
    assert str(folder / "env") in where
    out = run("pipeplan", "plan", "bert-large", "4x2-10g", "--effort", "0.1", cwd=folder, env=env)
    assert "bert-large on 4x2-10g" in out


def test_a_fresh_clone_draws_its_first_plan(tmp_path):
    """`git clone` and `make demo`, with an index of packages."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone", cwd=tmp_path)
    command = "make demo"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path / "clone", capture_output=True, text=True, timeout=2400
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("there is no index of packages")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The checker says: valid." in done.stdout
    assert (tmp_path / "clone" / "demo" / "bert.html").exists()
