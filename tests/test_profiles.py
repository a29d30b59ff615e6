"""Real layer profiles, measured and published by others: every plan for them passes the checker.

The profiles are not part of this repository. They are looked for beside it, in
`../shared/profiles`; without them these tests are skipped.
"""

import zlib
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from pipeplan import zoo
from pipeplan.checker import check
from pipeplan.cluster import Cluster
from pipeplan.documents.files import read_model
from pipeplan.planning.door import plan
from pipeplan.profile import ModelProfile

FOLDER = Path(__file__).parents[2] / "shared" / "profiles"
PROFILES = sorted(FOLDER.glob("*.model.json"))
MICROBATCHES = (4, 16, 64)

CASES = list(product(PROFILES, zoo.CLUSTER_NAMES, MICROBATCHES))

pytestmark = pytest.mark.skipif(not PROFILES, reason=f"there are no profiles in {FOLDER}")


def in_short_run(profile: Path, cluster: str, num_microbatches: int) -> bool:
    """A fixed tenth of the cases, spread over all profiles and clusters."""
    return zlib.crc32(f"{profile.name} {cluster} {num_microbatches}".encode()) % 10 == 0


@cache
def model_in(path: Path) -> ModelProfile:
    return read_model(path)


@cache
def cluster_named(name: str) -> Cluster:
    return zoo.cluster(name)


def cases() -> list:
    if not CASES:  # nothing to run, but the skip has to show
        return [pytest.param(None, None, None, id="no profiles")]
    return [
        pytest.param(
            *case,
            id=f"{case[0].name.removesuffix('.model.json')}-{case[1]}-{case[2]}",
            marks=[] if in_short_run(*case) else [pytest.mark.full],
        )
        for case in CASES
    ]


@pytest.mark.parametrize(("profile", "cluster", "num_microbatches"), cases())
def test_plans_for_real_profiles_are_valid(profile, cluster, num_microbatches):
    made = plan(
        model_in(profile), cluster_named(cluster), microbatches=num_microbatches, planner="spp"
    )
    verdict = check(made)
    assert verdict.ok, verdict.errors
    assert made.iteration_ms <= made.predicted.schedule_guarantee_ms * (1 + 1e-9)
