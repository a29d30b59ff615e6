"""Kills sweeps at random moments; a separate program, because it forks.

A forked child runs a sweep whose cases take no time, so nearly all of it is the journal and the
result being written. The child is killed, then the sweep is run to its end, and the result has
to be the same bytes as that of a sweep that nobody disturbed.
"""

import random
import sys
import time
from pathlib import Path

from killing import kill_while
from pipeplan import zoo
from pipeplan.planning.sweep import backends
from pipeplan.planning.sweep.backends import Backend
from pipeplan.planning.sweep.cases import expand_cases, run_case
from pipeplan.planning.sweep.journal import journal_path
from pipeplan.planning.sweep.running import run_sweep
from pipeplan.planning.sweep.specification import SweepSpec

SPEC = SweepSpec(
    models=("vgg19",),
    clusters=("4x2-10g", "random-8"),
    microbatches=(2, 4),
    planners=("1f1b", "gpipe"),
    seeds=(0,),
)


def main(folder: Path, num_kills: int) -> None:
    cases = expand_cases(SPEC, zoo.model, lambda name, seed: zoo.cluster(name, seed=seed))
    outcomes = {case.index: run_case(case) for case in cases}
    backends.run_case = lambda case: outcomes[case.index]
    output = folder / "r.csv"

    def sweep() -> None:
        run_sweep(cases, output, backend=Backend(jobs=1))

    begin_s = time.monotonic()
    sweep()
    whole, took_s = output.read_bytes(), time.monotonic() - begin_s
    rng = random.Random(0)
    num_with_journal = 0
    for _ in range(num_kills):
        output.unlink(missing_ok=True)
        kill_while(sweep, rng.uniform(0, 1.5 * took_s))
        assert not output.exists() or output.read_bytes() == whole
        num_with_journal += journal_path(output).exists()
        run_sweep(cases, output, backend=Backend(jobs=1))
        assert output.read_bytes() == whole
        assert [path.name for path in folder.iterdir()] == ["r.csv"]
    print(num_with_journal)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
