"""Surfaces that other people build on: public names, commands and flags, and who imports whom."""

import ast
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import pipeplan
from pipeplan import version
from pipeplan.commands.group import commands as cli

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
    "NoPlanError",
    "PipeplanError",
    "Plan",
    "Prediction",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Timeline",
    "Verdict",
    "__version__",
    "check",
    "compare",
    "expand_hosts",
    "plan",
    "plot",
    "plot_sweep",
    "read_cluster",
    "read_model",
    "read_plan",
    "simulate",
    "sweep",
    "write_cluster",
    "write_model",
    "write_plan",
    "write_report",
    "write_trace",
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


@pytest.mark.parametrize("package", ["measure", "runtime"])
def test_without_torch_the_remedy_is_named(package):
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import pipeplan\n"
        f"try: pipeplan.{package}\n"
        "except AttributeError as error: print(error)\n"
        f"import pipeplan.{package} as package\n"
        "for name in package.__all__:\n"
        "    try: getattr(package, name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    hint, *said = done.stdout.splitlines()
    assert hint.endswith(f"has no attribute '{package}'; write `import pipeplan.{package}` first")
    assert set(said) == {f"pipeplan.{package} needs PyTorch; pip install 'pipeplan[torch]'"}


def test_names_load_from_where_type_checkers_see_them():
    """The front door lists every name twice: once for tools, once for loading on first use."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    for node in guarded.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            seen = getattr(importlib.import_module(node.module), alias.name)
            assert getattr(pipeplan, alias.asname or alias.name) is seen
    named = {alias.asname or alias.name for node in guarded.body for alias in node.names}
    assert named == set(pipeplan.__all__)


def test_the_version_is_the_package_s():
    assert importlib.metadata.version("pipeplan") == version.VERSION


# ------------------------------------------------------------------- commands and flags

PLANNING_OPTIONS = {
    "--divisible",
    "--ignore-memory",
    "--no-cut-after",
    "--positions",
    "--shard-optimizer",
    "--split-backward",
    "--together",
    "--keep-tied",
    "--stages",
    "--max-stages",
    "--first-on",
    "--last-on",
    "--without",
    "--effort",
    "--runnable",
}

COMMANDS = {
    "calibrate": {
        "plan",
        "trace",
        "-o",
        "--output",
        "--model",
        "--cluster",
        "--planner",
        "--effort",
        "--json",
    },
    "check": {"plan", "--strict-memory", "--schedule", "--json"},
    "compare": {
        "model",
        "cluster",
        "-m",
        "--microbatches",
        "--planners",
        "--seed",
        "--report",
        "--json",
        *PLANNING_OPTIONS,
    },
    "demo": {"-o", "--output"},
    "discover": {"-o", "--output", "--from", "--processes", "--hosts", "--name", "--assume"},
    "export": {"plan", "--to", "-o", "--output", "--map", "--nearest"},
    "export-checkpoint": {"directory", "-o", "--output"},
    "import": {
        "file",
        "--from",
        "-o",
        "--output",
        "--name",
        "--microbatch-size",
        "--assume",
    },
    "plan": {
        "model",
        "cluster",
        "-m",
        "--microbatches",
        "--planner",
        "--schedule",
        "--uniform-replicas",
        *PLANNING_OPTIONS,
        "--time-limit",
        "--report",
        "--seed",
        "-o",
        "--output",
        "--json",
    },
    "plot": {
        "plan",
        "-o",
        "--output",
        "--width",
        "--font",
        "--x",
        "--y",
        "--by",
        "--where",
        "--over",
        "--mean",
        "--log",
        "--title",
        "--height",
        "--font-size",
    },
    "profile": {
        "build",
        "--batch",
        "--loss",
        "--targets",
        "--microbatch-size",
        "--at",
        "--layers",
        "--device",
        "--estimate",
        "--dtype",
        "--amp",
        "--repeats",
        "--name",
        "-o",
        "--output",
        "--json",
    },
    "report": {"plan", "-o", "--output"},
    "simulate": {"plan", "--json"},
    "sweep": {"spec", "-o", "--output", "--jobs", "--backend", "--address"},
    "testbed": {
        "plan",
        "--iterations",
        "--real",
        "--time-factor",
        "--whole-samples",
        "--way",
        "--report",
        "--trace",
        "--json",
    },
    "trace": {"plan", "-o", "--output"},
    "whatif": {
        "plan",
        "--slower",
        "--lose",
        "--link",
        "--add",
        "--planner",
        "--effort",
        "-o",
        "--output",
        "--report",
        "--json",
    },
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
    assert flags >= {"-q", "--quiet"}
    flags -= {"-q", "--quiet"}
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


# --------------------------------------------------------------------------------- sizes

MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 400
MAY_BE_LONGER: dict[str, str] = {
    "_core/bindings.cpp": "the only file that knows Python: a short function for each kernel",
    "_core/suffix_dp.hpp": "one recursion, all parts of which share its tables",
    "cost.py": "the one place where bytes become milliseconds",
}
"""By `path` or `path:function`, in one line each: why it may be longer."""


def python_functions(path: Path) -> dict[str, int]:
    """The lines of each function without its docstring; of several with one name the longest."""
    sizes = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            has_docstring = ast.get_docstring(node) is not None
            docstring = first.end_lineno - first.lineno + 1 if has_docstring else 0
            size = node.end_lineno - node.lineno + 1 - docstring
            sizes[node.name] = max(size, sizes.get(node.name, 0))
    return sizes


def cpp_functions(path: Path) -> dict[str, int]:
    """The same for functions and methods: from a line to a closing brace of equal indentation."""
    sizes, opened = {}, {}
    for number, line in enumerate(path.read_text().splitlines()):
        indent = len(line) - len(line.lstrip())
        if indent not in (0, 4) or not line.strip() or line.lstrip().startswith(("//", "#")):
            continue
        if line.lstrip().startswith("}"):
            header, begin = opened[indent]
            if not re.match(r"\s*(namespace|class|struct|enum)\b", header):
                size = number - begin + 1
                sizes[header.strip()] = max(size, sizes.get(header.strip(), 0))
        else:
            opened[indent] = (line, number)
    return sizes


def sources() -> list[Path]:
    return sorted(path for ending in ("py", "cpp", "hpp") for path in SOURCE.rglob(f"*.{ending}"))


def test_functions_and_modules_are_short():
    lines = {}
    for path in sources():
        name = str(path.relative_to(SOURCE))
        functions = python_functions(path) if path.suffix == ".py" else cpp_functions(path)
        lines[name] = len(path.read_text().splitlines()) - MAX_MODULE_LINES
        lines |= {f"{name}:{f}": size - MAX_FUNCTION_LINES for f, size in functions.items()}
    assert len(lines) > 1000
    assert {name for name, excess in lines.items() if excess > 0} == MAY_BE_LONGER.keys()


# --------------------------------------------------------------------- groups of kernels

CORE = SOURCE / "_core"
LISTS = {
    name: set(re.findall(r"(\w+)\.cpp", files))
    for name, files in re.findall(
        r"set\((\w+)\n(.*?)\)", (SOURCE.parents[1] / "CMakeLists.txt").read_text(), re.DOTALL
    )
}
COMPILER = shutil.which("c++") or shutil.which("g++")


def test_every_kernel_is_in_one_group():
    assert sorted(LISTS) == ["BINDINGS", "PLANS", "TIMES"]
    listed = [name for files in LISTS.values() for name in files]
    assert sorted(listed) == sorted(path.stem for path in CORE.glob("*.cpp"))


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("group", ["PLANS", "TIMES"])
def test_names_in_a_group_of_kernels_differ(group):
    lines = "".join(f'#include "{CORE / name}.cpp"\n' for name in sorted(LISTS[group]))
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-w", "-x", "c++", "-"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


# ------------------------------------------------------------------------------ layering

ROOMS = [
    {"errors"},
    {"late_imports", "validation", "version"},
    {"profile"},
    {"host_matrix", "shared_links"},
    {"cluster"},
    {"blocks"},
    {"timelines"},
    {"pipeline"},
    {"host_links"},
    {"documents"},
    {"_core"},
    {"contention"},
    {"measured_times", "memory_parts"},
    {"cost"},
    {"group_costs"},
    {"group_memory"},
    {"simulator", "group_simulator"},
    {"schedules", "group_schedules"},
    {"figures"},
    {"bound_checks", "group_checks", "number_checks", "plain_replay", "plain_sharing"},
    {"plain_flows", "plain_group_memory", "plain_groups"},
    {"plain_group_flows"},
    {"checker", "plugins", "zoo"},
    {"replaying"},
    {"planning.limits", "planning.same_file"},
    {"planning.options"},
    {"planning.problem"},
    {"planning.inputs", "planning.plausibility"},
    {"planning.prediction", "planning.group_order"},
    {"planning.planner", "planning.baselines"},
    {"planning.registry"},
    {"planning.door"},
    {"planning.comparison", "planning.global_batch", "planning.sweep", "planning.whatif"},
    {"planning.suggestions"},
    {"report"},
    {"interop"},
    {"calibration"},
    {"user_code"},
    {"splitting"},
    {"runtime"},
    {"measure"},
    {"run"},
    {"testbed"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
"""A room imports only from rooms above it, lazy imports included. Every module lies in a room."""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
OPTIONAL = {"torch", "matplotlib", "numba"}
MAY_NEED_OPTIONAL = {"runtime", "measure", "splitting", "testbed"}
CHECKER_MAY_IMPORT = {
    "bound_checks",
    "cluster",
    "cost",
    "errors",
    "group_checks",
    "group_costs",
    "number_checks",
    "pipeline",
    "plain_flows",
    "plain_group_flows",
    "plain_group_memory",
    "plain_groups",
    "plain_replay",
    "plain_sharing",
}


CHECKER_FILES = [
    "checker.py",
    *(f"{name}.py" for name in sorted(CHECKER_MAY_IMPORT) if "check" in name or "plain" in name),
]


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def room_of(module: str) -> str:
    """The room that a module lies in; the empty text for the front door and empty doors."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVEL:
            return ".".join(parts[:length])
    return ""


def name_of(path: Path) -> str:
    parts = ("pipeplan", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path: Path, *, at_top: bool) -> set[str]:
    """The modules that a module imports: at the top only, or anywhere, types included."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            # `from pipeplan import zoo` names a module, `from pipeplan import plan` a function.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [module for module in inside if is_module(module)]
            found |= set(named)
            if len(named) < len(inside):
                found.add(node.module)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_only_rooms_above_them(path):
    name = name_of(path)
    if name in ("pipeplan", "pipeplan.planning"):
        return  # the front door opens to every room; the other one is only a docstring
    room = room_of(name)
    assert room, f"{name} lies in no room; say in ROOMS where it belongs"
    for module in imports(path, at_top=False):
        if not module.startswith("pipeplan.") or room_of(module) == room:
            continue
        assert room_of(module), f"{name} imports {module}, which lies in no room"
        assert LEVEL[room_of(module)] < LEVEL[room], f"{room} imports {module}, which is below it"


def test_no_modules_import_each_other_in_a_circle():
    known = {name_of(path): path for path in modules()}
    del known["pipeplan"]  # the front door
    uses = {
        name: {module for module in imports(path, at_top=False) if module in known} - {name}
        for name, path in known.items()
    }
    while uses:
        free = [name for name, used in uses.items() if not used & uses.keys()]
        assert free, f"a circle among {sorted(uses)}"
        for name in free:
            del uses[name]


@pytest.mark.parametrize("file", CHECKER_FILES)
def test_the_checker_shares_only_the_costs(file):
    used = imports(SOURCE / file, at_top=False)
    rooms = {room_of(module) for module in used if module.startswith("pipeplan")}
    assert rooms <= CHECKER_MAY_IMPORT


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
        ("pipeplan.planning.door", ["torch", "rich", "yaml", "click", "matplotlib"]),
        ("pipeplan.documents.files", ["torch", "rich", "yaml", "click"]),
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
