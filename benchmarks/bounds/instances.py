"""Clusters with irregular links, and real models on them: what the bounds are measured on."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pipeplan as pp

PROFILES = Path(__file__).parents[2].parent / "shared" / "profiles"
MODELS = ("transformer-big", "bert-large", "resnet152", "gpt2-xl")
NUM_MODELS = 6
"""Models that each family of clusters meets, at each size."""
MICROBATCHES = (8, 16, 32, 64)
SIZES = (12, 14, 16, 64)

Matrix = list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One planning problem of the suite."""

    family: str
    model: pp.ModelProfile
    cluster: pp.Cluster
    num_microbatches: int

    @property
    def name(self) -> str:
        return f"{self.cluster.name} / {self.model.name} / {self.num_microbatches}"


def _links(size: int, rate: Callable[[int, int], float]) -> Matrix:
    return [[0.0 if u == v else round(rate(u, v), 3) for v in range(size)] for u in range(size)]


def uniform(rng: random.Random, size: int) -> Matrix:
    """Each link 2 to 20 GB/s."""
    return _links(size, lambda u, v: rng.uniform(2.0, 20.0))


def spread_4(rng: random.Random, size: int) -> Matrix:
    """Each link 5 to 20 GB/s, log-uniform."""
    return _links(size, lambda u, v: 5.0 * 4.0 ** rng.random())


def spread_100(rng: random.Random, size: int) -> Matrix:
    """Each link 0.5 to 50 GB/s, log-uniform."""
    return _links(size, lambda u, v: 0.5 * 100.0 ** rng.random())


def geometric(rng: random.Random, size: int) -> Matrix:
    """Points in a square; the rate falls with the distance, from 40 to about 1 GB/s."""
    points = [(rng.random(), rng.random()) for _ in range(size)]
    return _links(size, lambda u, v: 40.0 / (1.0 + 30.0 * math.dist(points[u], points[v])))


def clustered(rng: random.Random, size: int) -> Matrix:
    """Hosts of 1 to 8 devices, each with a rate of its own; so has each pair of hosts."""
    host_of: list[int] = []
    while len(host_of) < size:
        host_of += [len(set(host_of))] * rng.randint(1, 8)
    inside = [rng.choice((12.0, 50.0, 130.0)) for _ in range(size)]
    between = [[1.0 * 16.0 ** rng.random() for _ in range(size)] for _ in range(size)]

    def rate(u: int, v: int) -> float:
        a, b = sorted((host_of[u], host_of[v]))
        return inside[a] if a == b else between[a][b]

    return _links(size, rate)


def one_way(rng: random.Random, size: int) -> Matrix:
    """Symmetric links of 2 to 20 GB/s; a third of them has a tenth of it in one direction."""
    base = uniform(rng, size)
    slow = [[rng.random() < 1 / 6 for _ in range(size)] for _ in range(size)]
    return _links(size, lambda u, v: base[min(u, v)][max(u, v)] * (0.1 if slow[u][v] else 1.0))


LINKS = (uniform, spread_4, spread_100, geometric, clustered, one_way)


def make_cluster(links: str, size: int, *, uneven: bool, seed: int) -> pp.Cluster:
    """A cluster of one family; with `uneven` speeds from 0.4 to 1."""
    rng = random.Random(f"{links} {size} {uneven} {seed}")
    matrix = globals()[links](rng, size)
    speeds = [round(rng.uniform(0.4, 1.0), 2) if uneven else 1.0 for _ in range(size)]
    return pp.Cluster(
        name=f"{links}-{size}{'-uneven' if uneven else ''}-{seed}",
        devices=tuple(pp.Device(name=f"d{u}", speed=speed) for u, speed in enumerate(speeds)),
        bandwidth_gb_per_s=tuple(map(tuple, matrix)),
        latency_us=tuple(tuple(0.0 if u == v else 10.0 for v in range(size)) for u in range(size)),
    )


def models() -> list[pp.ModelProfile]:
    """The measured profiles if they are present, and some of the zoo; no more than 200 layers."""
    found = [pp.read_model(path) for path in sorted(PROFILES.glob("*.model.json"))]
    found += [pp.zoo.model(name) for name in MODELS]
    return [model for model in found if model.num_layers <= 200]


def instances(sizes: tuple[int, ...] = SIZES) -> Iterator[Instance]:
    """The suite; models and microbatches take turns, so that each family meets all of them."""
    turn = itertools.cycle(models())
    counts = itertools.cycle(MICROBATCHES + MICROBATCHES[1:])
    for size in sizes:
        for links in LINKS:
            for uneven in (False, True):
                for seed in range(NUM_MODELS):
                    yield Instance(
                        family=links.__name__ + (", uneven" if uneven else ""),
                        model=next(turn),
                        cluster=make_cluster(links.__name__, size, uneven=uneven, seed=seed),
                        num_microbatches=next(counts),
                    )
