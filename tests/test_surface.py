"""Surfaces that other people build on: public names, commands and flags, and who imports whom."""

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import click
import pytest

import pipeplan
from pipeplan import version
from pipeplan.cli import cli

SOURCE = Path(pipeplan.__file__).parent

# ------------------------------------------------------------------------ public names

PUBLIC = {
    "Block",
    "Bound",
    "Cluster",
    "Device",
    "Duplex",
    "HostGroup",
    "InfeasibleError",
    "InputError",
    "Kind",
    "LayerProfile",
    "ModelProfile",
    "PipeplanError",
    "Plan",
    "Prediction",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Timeline",
    "Verdict",
    "check",
    "expand_hosts",
    "plan",
    "read_cluster",
    "read_model",
    "read_plan",
    "simulate",
    "write_cluster",
    "write_model",
    "write_plan",
    "write_report",
    "zoo",
}


def test_public_names_stay():
    assert set(pipeplan.__all__) >= PUBLIC


def test_public_names_are_sorted_and_there():
    assert list(pipeplan.__all__) == sorted(set(pipeplan.__all__))
    assert dir(pipeplan) == pipeplan.__all__
    for name in pipeplan.__all__:
        assert getattr(pipeplan, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pipeplan.nothing  # noqa: B018


def test_names_load_from_where_type_checkers_see_them():
    """The front door lists every name twice: once for tools, once for loading on first use."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            seen = getattr(importlib.import_module(node.module), alias.name)
            assert getattr(pipeplan, alias.name) is seen
    named = {alias.name for node in guarded.body for alias in node.names}
    assert named == set(pipeplan.__all__)


def test_the_version_is_the_package_s():
    assert importlib.metadata.version("pipeplan") == version.VERSION


# ------------------------------------------------------------------- commands and flags

COMMANDS = {
    "check": {"plan", "--strict-memory", "--json"},
    "compare": {
        "model",
        "cluster",
        "-m",
        "--microbatches",
        "--planners",
        "--seed",
        "--report",
        "--json",
    },
    "demo": {"-o", "--output"},
    "plan": {
        "model",
        "cluster",
        "-m",
        "--microbatches",
        "--planner",
        "--schedule",
        "--runnable",
        "--effort",
        "--time-limit",
        "--report",
        "--seed",
        "-o",
        "--output",
        "--json",
    },
    "plot": {"plan", "-o", "--output", "--width"},
    "report": {"plan", "-o", "--output"},
    "simulate": {"plan", "--json"},
    "trace": {"plan", "-o", "--output"},
    "zoo": {
        "name",
        "--device",
        "--microbatch-size",
        "--sequence-length",
        "--precision",
        "--seed",
        "-o",
        "--output",
        "--json",
    },
}
MAY_GROW = {"plan"}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_and_flags_stay(name):
    command = cli.get_command(click.Context(cli), name)
    flags = {flag for parameter in command.params for flag in parameter.opts}
    if name in MAY_GROW:
        assert flags >= COMMANDS[name]
    else:
        assert flags == COMMANDS[name]


@pytest.mark.parametrize("name", sorted(cli.list_commands(click.Context(cli))))
def test_every_flag_is_explained(name):
    command = cli.get_command(click.Context(cli), name)
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}: has no help"


# ------------------------------------------------------------------------------ layering

ROOMS = [
    {"errors"},
    {"validation", "spelling", "version"},
    {"profile"},
    {"cluster"},
    {"pipeline"},
    {"_core"},
    {"cost"},
    {"simulator"},
    {"schedules"},
    {"problem"},
    {"prediction"},
    {"planner", "baselines", "checker"},
    {"zoo"},
    {"planning"},
    {"syntax"},
    {"files"},
    {"report"},
    {"commands"},
    {"cli"},
]
"""A room imports only from rooms above it. Rooms that are not here stand between files and
commands: they may import all that is above files, and only report and what follows it, or one
another, may import them."""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
OPTIONAL = {"torch", "matplotlib", "numba"}
MAY_NEED_OPTIONAL = {"runtime", "measure", "splitting"}
EXCEPTIONS = {("pipeplan.pipeline", "pipeplan.report.notebook")}
"""A plan shows itself in notebooks, so it has to know who draws it."""
CHECKER_MAY_IMPORT = {"cost", "errors", "pipeline"}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def name_of(path: Path) -> str:
    parts = ("pipeplan", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_top: bool) -> set[str]:
    """The modules that a module imports: at the top only, or anywhere, types included."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "pipeplan":  # `from pipeplan import zoo` names a module
                found |= {f"pipeplan.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_only_rooms_above_them(path):
    room = room_of(name_of(path))
    if not room:
        return  # the front door opens to every room
    level = LEVEL.get(room, LEVEL["files"] + 0.5)
    for module in imports(path, at_top=False):
        target = room_of(module)
        if not module.startswith("pipeplan.") or target == room:
            continue
        if (name_of(path), module) in EXCEPTIONS:
            continue
        allowed = LEVEL.get(target, LEVEL["files"] + 0.5)
        both_unlisted = room not in LEVEL and target not in LEVEL
        assert allowed < level or both_unlisted, f"{room} imports {module}, which stands below it"


def test_the_checker_shares_only_the_costs():
    rooms = {room_of(m) for m in imports(SOURCE / "checker.py", at_top=False) if "." in m}
    assert rooms - {"abc"} <= CHECKER_MAY_IMPORT


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_optional_packages_stay_in_their_rooms(path):
    found = {module.split(".")[0] for module in imports(path, at_top=True)}
    if room_of(name_of(path)) not in MAY_NEED_OPTIONAL:
        assert not found & OPTIONAL


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pipeplan", ["click", "numpy", "torch", "rich", "yaml", "msgspec"]),
        ("pipeplan.cli", ["numpy", "torch", "rich", "yaml", "msgspec"]),
        ("pipeplan.planning", ["torch", "rich", "yaml", "click", "matplotlib"]),
        ("pipeplan.files", ["torch", "rich", "yaml", "click"]),
    ],
)
def test_imports_stay_light(module, unwanted):
    script = f"import sys, {module}; print([m for m in {unwanted} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_planning_loads_no_more_of_numpy_than_it_needs():
    """`np.median` and `np.unique` import masked arrays, which takes as long as a small plan."""
    script = (
        "import sys, pipeplan as pp; from pipeplan import zoo;"
        "pp.plan(zoo.model('vgg19'), zoo.cluster('4x2-10g'), 4);"
        "print('numpy.ma' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("False\n", "")
