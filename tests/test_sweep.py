"""Sweeps: the grid, the same rows whatever the backend, and nothing lost to `kill -9`."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeplan import zoo
from pipeplan.commands.sweep import sweep_command
from pipeplan.documents import files
from pipeplan.documents.files import write_cluster, write_model
from pipeplan.errors import InputError, PipeplanError
from pipeplan.planning.sweep import backends
from pipeplan.planning.sweep.backends import Backend
from pipeplan.planning.sweep.cases import expand_cases, run_case
from pipeplan.planning.sweep.journal import journal_path
from pipeplan.planning.sweep.running import run_sweep, sweep
from pipeplan.planning.sweep.specification import SweepSpec, read_spec

pytest.importorskip("joblib")

SPEC = SweepSpec(
    models=("vgg19", "inception-v3"),
    clusters=("4x2-10g", "random-8"),
    microbatches=(2, 4),
    planners=("spp",),
    seeds=(0, 1),
)
ALONE = Backend(jobs=1)
KILLER = Path(__file__).with_name("kill_sweeps.py")


def cases_of(spec: SweepSpec):
    return expand_cases(spec, zoo.model, lambda name, seed: zoo.cluster(name, seed=seed))


def write_spec(folder: Path, **changes) -> Path:
    document = {
        "format": "pipeplan.sweep/1",
        "models": ["vgg19"],
        "clusters": ["4x2-10g"],
        "microbatches": [2],
        "planners": ["spp"],
        **changes,
    }
    path = folder / "spec.json"
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))
    return path


class TestSpec:
    def test_yaml(self, tmp_path):
        path = tmp_path / "spec.yaml"
        path.write_text(
            "format: pipeplan.sweep/1\nmodels: [vgg19]\nclusters: [random-8]\n"
            "microbatches: [2, 4]\nplanners: [spp]\nseeds: [0, 5]\n"
        )
        assert read_spec(path).num_cases == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model": ["vgg19"]}, "model: is not a field of a sweep; did you mean 'models'"),
            ({"format": "pipeplan.planning.sweep/2"}, "format: 'pipeplan.planning.sweep/2' is not"),
            ({"models": None}, "models: is missing"),
            ({"models": []}, "models: is not a list with at least one"),
            ({"models": "vgg19"}, "models: is not a list"),
            ({"models": ["vgg19", "vgg19"]}, r"models\[1\]: 'vgg19' stands twice"),
            ({"microbatches": [0]}, r"microbatches\[0\]: 0 is not at least 1"),
            ({"microbatches": [True]}, r"microbatches\[0\]: True is not a whole number"),
            ({"microbatches": [2.5]}, r"microbatches\[0\]: 2.5 is not a whole number"),
            ({"seeds": [-1]}, r"seeds\[0\]: -1 is not at least 0"),
            ({"planners": [1]}, r"planners\[0\]: 1 is not text"),
            ({"seeds": [2**64]}, r"seeds\[0\]: 18446744073709551616 is more than"),
            ({"microbatches": [65_537]}, r"microbatches\[0\]: 65537 is more than 65536"),
            ({"effort": 0}, r"effort: 0 is not a number within 0.01..1000"),
            ({"effort": True}, r"effort: True is not a number"),
            ({"runnable": "yes"}, r"runnable: 'yes' is neither true nor false"),
            (
                {"models": [str(index) for index in range(2000)], "seeds": list(range(600))},
                "divide",
            ),
        ],
    )
    def test_refuses(self, tmp_path, changes, message):
        with pytest.raises(InputError, match=message):
            read_spec(write_spec(tmp_path, **changes))

    def test_refuses_planners_that_nobody_knows(self):
        with pytest.raises(InputError, match=r"planners\[0\]: 'sppp' is not known"):
            cases_of(replace(SPEC, planners=("sppp",)))

    def test_refuses_what_cannot_be_a_backend(self):
        with pytest.raises(InputError, match="backend: 'dusk' is not known; did you mean 'dask'"):
            Backend(name="dusk")
        with pytest.raises(InputError, match="jobs: 0"):
            Backend(jobs=0)
        with pytest.raises(InputError, match="address"):
            Backend(address="tcp://somewhere:1")


class TestRows:
    def test_in_the_order_of_the_grid(self, tmp_path):
        rows = run_sweep(cases_of(SPEC), tmp_path / "r.csv", backend=ALONE)
        keys = [(r.model, r.cluster, r.microbatches, r.planner, r.seed) for r in rows]
        assert len(keys) == SPEC.num_cases == 16
        assert keys[:3] == [
            ("vgg19", "4x2-10g", 2, "spp", 0),
            ("vgg19", "4x2-10g", 2, "spp", 1),
            ("vgg19", "4x2-10g", 4, "spp", 0),
        ]
        with (tmp_path / "r.csv").open() as file:
            written = list(csv.DictReader(file))
        assert [float(row["iteration_ms"]) for row in written] == [r.iteration_ms for r in rows]
        assert not journal_path(tmp_path / "r.csv").exists()

    def test_seeds_change_random_clusters(self, tmp_path):
        rows = run_sweep(cases_of(SPEC), tmp_path / "r.csv", backend=ALONE)
        by_cluster = {}
        for row in rows:
            by_cluster.setdefault((row.model, row.cluster, row.microbatches), []).append(row)
        for (_, cluster, _), (first, second) in by_cluster.items():
            assert (first.iteration_ms == second.iteration_ms) == (cluster != "random-8")

    def test_errors_are_rows(self, tmp_path):
        cluster = zoo.cluster("4x2-10g")
        tiny = replace(cluster, devices=tuple(replace(d, memory_gb=1e-6) for d in cluster.devices))
        cases = [replace(case, cluster=tiny) for case in cases_of(SPEC)[:1]]
        (row,) = run_sweep(cases, tmp_path / "r.csv", backend=ALONE)
        assert row.iteration_ms is None
        assert "more than any device" in row.error

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_processes_give_the_same_file(self, tmp_path, jobs):
        run_sweep(cases_of(SPEC), tmp_path / "alone.csv", backend=ALONE)
        run_sweep(cases_of(SPEC), tmp_path / "many.csv", backend=Backend(jobs=jobs))
        assert (tmp_path / "alone.csv").read_bytes() == (tmp_path / "many.csv").read_bytes()

    @pytest.mark.full
    @pytest.mark.parametrize("name", ["dask", "ray"])
    def test_other_backends_give_the_same_file(self, tmp_path, name):
        """In a process of its own: both leave threads and warnings behind."""
        pytest.importorskip("distributed" if name == "dask" else name)
        run_sweep(cases_of(SPEC), tmp_path / "alone.csv", backend=ALONE)
        run_script(tmp_path, f"Backend(name={name!r}, jobs=2)", "other.csv")
        assert (tmp_path / "alone.csv").read_bytes() == (tmp_path / "other.csv").read_bytes()

    def test_options_reach_the_planner(self):
        spec = replace(SPEC, divisible=True, effort=0.5)
        for case in cases_of(spec):
            assert (case.divisible, case.effort) == (True, 0.5)
        model = replace(zoo.model("vgg19"), microbatch_size=2)
        case = replace(cases_of(replace(SPEC, planners=("data-parallel",)))[0], model=model)
        assert run_case(case).row.has_whole_samples is False
        assert run_case(replace(case, divisible=True)).row.has_whole_samples
        wrong = run_case(replace(case, without=("nobody",))).row
        assert wrong.error.startswith("without: 'nobody' is no device")  # a reason, as always

    def test_the_public_function_takes_a_file_or_a_specification(self, tmp_path):
        write_model(zoo.model("vgg19"), tmp_path / "mine.json")
        spec = write_spec(tmp_path, models=["mine.json", "vgg19"], seeds=[2**64 - 1])
        counts = []
        rows = sweep(
            spec, tmp_path / "r.csv", jobs=1, on_progress=lambda *count: counts.append(count)
        )
        assert [row.model for row in rows] == ["mine.json", "vgg19"]
        assert rows[0].iteration_ms == rows[1].iteration_ms
        assert counts == [(0, 2), (1, 2), (2, 2)]
        same = sweep(
            SweepSpec(
                models=("vgg19",), clusters=("4x2-10g",), microbatches=(2,), planners=("spp",)
            ),
            str(tmp_path / "s.csv"),
            jobs=1,
        )
        assert same[0].iteration_ms == rows[0].iteration_ms
        with pytest.raises(InputError, match="backend: 'lokky' is not known"):
            sweep(spec, tmp_path / "r.csv", backend="lokky")

    def test_a_name_of_the_zoo_is_not_a_file_beside_the_specification(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "vgg19").write_text("not a model")
        write_spec(tmp_path)
        assert sweep("spec.json", "r.csv", jobs=1)[0].error is None

    @pytest.mark.parametrize("name", ["r.csv", "r.csv.journal"])
    def test_an_output_that_is_an_input_is_refused(self, tmp_path, name):
        write_model(zoo.model("vgg19"), tmp_path / name)
        spec = write_spec(tmp_path, models=[name])
        with pytest.raises(InputError, match=f"is the same file as the model '{name}'"):
            sweep(spec, tmp_path / "r.csv", jobs=1)
        assert files.read_model(tmp_path / name) == zoo.model("vgg19")

    @pytest.mark.parametrize(
        "name", ["=1+1", "+1", "-1", "@x", "\t=1", "\r1", "  =cmd|' /C calc'!A0", "\ufeff=1", "＝1"]
    )
    def test_cells_that_a_spreadsheet_would_run_stay_text(self, tmp_path, name):
        case = replace(cases_of(SPEC)[0], model_name=name, cluster_name="plain")
        run_sweep([case], tmp_path / "r.csv", backend=ALONE)
        with (tmp_path / "r.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert row["model"] == f"'{name}"
        assert row["cluster"] == "plain"
        float(row["iteration_ms"])

    def test_numbers_stay_numbers(self, tmp_path, monkeypatch):
        outcome = run_case(cases_of(SPEC)[0])
        negative = replace(outcome, row=replace(outcome.row, bubble_fraction=-1e-17))
        monkeypatch.setattr(backends, "run_case", lambda case: negative)
        run_sweep(cases_of(SPEC)[:1], tmp_path / "r.csv", backend=ALONE)
        assert ",-1e-17," in (tmp_path / "r.csv").read_text()

    def test_errors_hold_no_control_characters(self):
        cluster = zoo.cluster("4x2-10g")
        tiny = replace(cluster, devices=tuple(replace(d, memory_gb=1e-6) for d in cluster.devices))
        case = cases_of(SPEC)[0]
        layers = tuple(replace(x, name=f"\x1b[2J{x.name}\n") for x in case.model.layers)
        row = run_case(replace(case, cluster=tiny, model=replace(case.model, layers=layers))).row
        assert row.error.isprintable()

    def test_parquet(self, tmp_path):
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = run_sweep(cases_of(SPEC)[:2], tmp_path / "r.parquet", backend=ALONE)
        table = parquet.read_table(tmp_path / "r.parquet").to_pylist()
        assert [entry["iteration_ms"] for entry in table] == [row.iteration_ms for row in rows]
        assert table[0]["error"] is None
        assert table[0]["microbatches"] == 2

    def test_other_suffixes_are_refused_before_anything_runs(self, tmp_path):
        with pytest.raises(InputError, match=r"use \.csv or \.parquet"):
            run_sweep(cases_of(SPEC), tmp_path / "r.xlsx", backend=ALONE)
        assert list(tmp_path.iterdir()) == []


class Interrupted(Exception):
    pass


def interrupt_after(count: int):
    def on_progress(done: int, total: int) -> None:
        if done == count:
            raise Interrupted

    return on_progress


class TestResuming:
    def test_goes_on_where_it_stood(self, tmp_path, monkeypatch):
        output = tmp_path / "r.csv"
        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=interrupt_after(5))
        assert not output.exists()
        assert len(journal_path(output).read_bytes().splitlines()) == 6  # with its head
        ran = []
        run_case = backends.run_case
        monkeypatch.setattr(backends, "run_case", lambda case: ran.append(case) or run_case(case))
        run_sweep(cases_of(SPEC), output, backend=ALONE)
        assert [case.index for case in ran] == list(range(5, 16))
        run_sweep(cases_of(SPEC), tmp_path / "whole.csv", backend=ALONE)
        assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes()

    def test_a_line_cut_short_does_not_count(self, tmp_path):
        output = tmp_path / "r.csv"
        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=interrupt_after(3))
        journal = journal_path(output)
        journal.write_bytes(journal.read_bytes()[:-20])
        counts = []
        run_sweep(
            cases_of(SPEC), output, backend=ALONE, on_progress=lambda done, _: counts.append(done)
        )
        assert counts[0] == 2
        run_sweep(cases_of(SPEC), tmp_path / "whole.csv", backend=ALONE)
        assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes()

    def test_a_journal_of_another_sweep_is_refused(self, tmp_path):
        output = tmp_path / "r.csv"
        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=interrupt_after(1))
        other = cases_of(replace(SPEC, microbatches=(2, 8)))
        with pytest.raises(InputError, match="belongs to another sweep"):
            run_sweep(other, output, backend=ALONE)

    def test_changed_inputs_are_another_sweep(self, tmp_path):
        output = tmp_path / "r.csv"
        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=interrupt_after(1))
        changed = [replace(case, model=zoo.model("resnet152")) for case in cases_of(SPEC)]
        with pytest.raises(InputError, match="belongs to another sweep"):
            run_sweep(changed, output, backend=ALONE)

    def test_a_damaged_journal_is_refused(self, tmp_path):
        output = tmp_path / "r.csv"
        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=interrupt_after(2))
        journal = journal_path(output)
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(lines[0] + b"{]\n" + lines[2])
        with pytest.raises(InputError, match="is damaged"):
            run_sweep(cases_of(SPEC), output, backend=ALONE)

    def test_two_at_once_are_refused(self, tmp_path):
        output = tmp_path / "r.csv"

        def again(done: int, total: int) -> None:
            with pytest.raises(InputError, match="another sweep is writing"):
                run_sweep(cases_of(SPEC), output, backend=ALONE)
            raise Interrupted

        with pytest.raises(Interrupted):
            run_sweep(cases_of(SPEC), output, backend=ALONE, on_progress=again)

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_survives_kill_9(self, tmp_path, jobs):
        """Killed several times at whatever point; only cases under way may run again."""
        output = tmp_path / "r.csv"
        journal = journal_path(output)
        kept = 0
        for wanted in (2, 5, 9):
            process = start_script(tmp_path, f"Backend(jobs={jobs})", "r.csv", pause_s=0.05)
            try:
                deadline_s = time.monotonic() + 60
                while lines_in(journal) <= wanted and process.poll() is None:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.005)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # its own group: the workers too
                process.wait()
            now = lines_in(journal)
            assert now >= kept  # nothing that was there is lost
            kept = now
        assert not output.exists()
        counts = []
        run_sweep(
            cases_of(SPEC), output, backend=ALONE, on_progress=lambda done, _: counts.append(done)
        )
        assert counts[0] == kept - 1 >= 9
        run_sweep(cases_of(SPEC), tmp_path / "whole.csv", backend=ALONE)
        assert output.read_bytes() == (tmp_path / "whole.csv").read_bytes()

    @pytest.mark.parametrize("num_kills", [50, pytest.param(200, marks=pytest.mark.full)])
    def test_killed_writers_lose_nothing(self, tmp_path, num_kills):
        done = subprocess.run(
            [sys.executable, str(KILLER), str(tmp_path), str(num_kills)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) > num_kills / 2  # that many were killed before they were done

    def test_workers_end_with_a_sweep_that_was_killed(self, tmp_path):
        process = start_script(tmp_path, "Backend(jobs=2)", "r.csv", pause_s=0.05)
        try:
            wait_for(lambda: lines_in(journal_path(tmp_path / "r.csv")) > 2)
            assert len(group_of(process.pid)) > 1
            process.kill()  # the sweep alone, not its workers
            process.wait()
            wait_for(lambda: not group_of(process.pid))
        finally:
            if group_of(process.pid):
                os.killpg(process.pid, signal.SIGKILL)

    def test_a_worker_that_dies_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setattr(backends, "run_case", end_worker)
        with pytest.raises(PipeplanError, match="a worker process ended without a result"):
            run_sweep(cases_of(SPEC), tmp_path / "r.csv", backend=Backend(jobs=2))


def end_worker(case) -> None:
    os._exit(9)


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def group_of(leader: int) -> list[int]:
    """The living processes in a group; those that only wait to be counted are not living."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(group) == leader and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def lines_in(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def start_script(
    folder: Path, backend: str, output: str, pause_s: float = 0.0
) -> "subprocess.Popen[bytes]":
    """A sweep of SPEC in a process group of its own."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import time
            from pipeplan import zoo
            from pipeplan.planning.sweep.backends import Backend
            from pipeplan.planning.sweep.cases import expand_cases
            from pipeplan.planning.sweep.running import run_sweep
            from pipeplan.planning.sweep.specification import SweepSpec

            if __name__ == "__main__":
                cases = expand_cases(
                    {SPEC!r}, zoo.model, lambda name, seed: zoo.cluster(name, seed=seed)
                )
                run_sweep(
                    cases,
                    {str(folder / output)!r},
                    backend={backend},
                    on_progress=lambda done, total: time.sleep({pause_s}),
                )
            """
        )
    )
    return subprocess.Popen([sys.executable, str(script)], start_new_session=True)


def run_script(folder: Path, backend: str, output: str) -> None:
    assert start_script(folder, backend, output).wait(timeout=180) == 0


class TestCommand:
    def test_files_lie_beside_the_specification(self, tmp_path, monkeypatch):
        folder = tmp_path / "inputs"
        folder.mkdir()
        write_model(zoo.model("vgg19"), folder / "mine.model.json")
        write_cluster(zoo.cluster("4x2-10g"), folder / "mine.cluster.json")
        spec = write_spec(folder, models=["mine.model.json"], clusters=["mine.cluster.json"])
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(sweep_command, [str(spec), "-o", "r.csv", "--jobs", "1"])
        assert result.exit_code == 0, result.output
        with open("r.csv") as file:
            (row,) = csv.DictReader(file)
        assert row["model"] == "mine.model.json"
        assert float(row["iteration_ms"]) > 0
        assert result.stdout == ""

    def test_a_missing_folder_is_named(self, tmp_path):
        spec = write_spec(tmp_path)
        output = str(tmp_path / "nowhere" / "r.csv")
        result = CliRunner().invoke(sweep_command, [str(spec), "-o", output])
        assert isinstance(result.exception, InputError)
        assert "nowhere: is not a folder" in str(result.exception)
