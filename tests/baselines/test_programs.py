"""Each dynamic program against all plans tried, under the design's own cost model."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from instances import random_cluster, random_model
from oracles import compositions
from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.planning.baselines.alpa import split_alpa, submesh_sizes
from pipeplan.planning.baselines.cuts import balanced_ends
from pipeplan.planning.baselines.dapple import (
    least_bottleneck_splits,
    pipeline_latency_ms,
    split_dapple,
)
from pipeplan.planning.baselines.pipedream import split_pipedream
from pipeplan.planning.baselines.piper import split_piper
from pipeplan.planning.baselines.view import view_cluster
from plain_placements import PlacementProgram


def random_cost(rng: random.Random, max_layers: int = 5, max_devices: int = 5) -> CostModel:
    """Every device a host of its own: what planners see as flat."""
    return CostModel(
        random_model(rng, rng.randint(1, max_layers)),
        random_cluster(rng, rng.randint(1, max_devices)),
    )


def hosts_cost(rng: random.Random, num_hosts: int, per_host: int, max_layers: int = 5) -> CostModel:
    cluster = expand_hosts(
        "hosts",
        [HostGroup(count=num_hosts, devices=per_host, bandwidth_gb_per_s=rng.uniform(1, 20))],
        between_hosts_gb_per_s=rng.uniform(0.2, 5),
    )
    return CostModel(random_model(rng, rng.randint(2, max_layers)), cluster)


def all_splits(num_layers: int, num_devices: int, *, use_all: bool):
    """Every list of (start, end, replicas)."""
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for used in [num_devices] if use_all else range(num_stages, num_devices + 1):
            for layers in compositions(num_layers, num_stages):
                for replicas in compositions(used, num_stages):
                    ends = np.cumsum(layers).tolist()
                    starts = [0, *ends[:-1]]
                    yield list(zip(starts, ends, replicas, strict=True))


def crossing(cost: CostModel, k: int) -> float:
    return float(cost.output_bytes_L[k - 1]) if 0 < k < len(cost.output_bytes_L) else 0.0


def work(cost: CostModel, start: int, end: int) -> float:
    return float((cost.forward_ms_L + cost.backward_ms_L)[start:end].sum())


def parameters(cost: CostModel, start: int, end: int) -> float:
    return float(cost.parameter_bytes_L[start:end].sum())


class TestBalancedCuts:
    def test_equals_all_cuts_tried(self):
        for seed in range(200):
            rng = random.Random(seed)
            values = [rng.choice([0.0, 1.0, rng.uniform(0, 5)]) for _ in range(rng.randint(1, 8))]
            num_stages = rng.randint(1, len(values))
            ends = balanced_ends(np.array(values), num_stages)
            found = max(sum(values[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True))
            expected = min(
                max(sum(values[e - n : e]) for n, e in zip(sizes, np.cumsum(sizes), strict=True))
                for sizes in compositions(len(values), num_stages)
            )
            assert found == pytest.approx(expected)


class TestPipeDream:
    def test_flat_equals_all_partitions_tried(self):
        for seed in range(150):
            cost = random_cost(random.Random(seed))
            view = view_cluster(cost)
            rate = view.flat_bytes_per_ms

            def bottleneck(split, cost=cost, view=view, rate=rate):
                times = []
                for index, (start, end, m) in enumerate(split):
                    sync = 4 * (m - 1) * parameters(cost, start, end) / (m * rate)
                    times.append((work(cost, start, end) / view.speed + sync) / m)
                    if index:
                        times.append(2 * crossing(cost, start) / (rate * m))
                        times.append(2 * crossing(cost, end) / (rate * m))
                return max(times)

            num_layers = len(cost.forward_ms_L)
            splits = all_splits(num_layers, view.num_devices, use_all=True)
            expected = min(bottleneck(split) for split in splits)
            made = split_pipedream(cost)
            assert made.objective_ms == pytest.approx(expected)
            as_split = [(s.layers.start, s.layers.stop, s.num_replicas) for s in made.stages]
            assert bottleneck(as_split) == pytest.approx(expected)

    def test_two_levels_equal_the_recursion_written_out(self):
        for seed in range(40):
            rng = random.Random(seed)
            cost = hosts_cost(rng, rng.randint(2, 3), rng.randint(2, 3))
            view = view_cluster(cost)
            num_layers = len(cost.forward_ms_L)

            def solve(compute, rate, cost=cost, num_layers=num_layers):
                def alone(i, j, m):
                    return (compute(i, j) + 4 * (m - 1) * parameters(cost, i, j) / (m * rate)) / m

                @cache
                def best(i, j, m):
                    options = [alone(i, j, m)]
                    for k in range(i + 1, j):
                        for extra in range(1, m):
                            sends = [2 * crossing(cost, x) / (rate * extra) for x in (k, j)]
                            parts = [best(i, k, m - extra), alone(k, j, extra), *sends]
                            options.append(max(parts))
                    return min(options)

                return best

            def compute(i, j, cost=cost):
                return work(cost, i, j)

            inner = solve(compute, view.inside_bytes_per_ms)

            per_host = len(view.hosts[0])

            def host_time(i, j, inner=inner, per_host=per_host):
                return inner(i, j, per_host)

            outer = solve(host_time, view.between_bytes_per_ms)
            made = split_pipedream(cost)
            assert made.objective_ms == pytest.approx(outer(0, num_layers, len(view.hosts)))
            used = sorted(d for stage in made.stages for d in stage.devices)
            assert used == list(range(view.num_devices))


class TestPiper:
    @pytest.mark.parametrize("limited", [False, True])
    def test_equals_all_partitions_tried(self, limited):
        compared = 0
        for seed in range(120):
            rng = random.Random(seed)
            cost = random_cost(rng)
            microbatches = rng.randint(1, 6)
            memory_bytes = rng.uniform(2e6, 4e7) if limited else float("inf")
            view = replace(view_cluster(cost), memory_bytes=memory_bytes)
            rate = view.flat_bytes_per_ms

            def bottleneck(split, cost=cost, view=view, rate=rate, microbatches=microbatches):
                used = sum(d for _, _, d in split)
                times = []
                for start, end, d in split:
                    compute = work(cost, start, end) / view.speed
                    sent = 2 * (crossing(cost, start) + crossing(cost, end))
                    sync = 4 * (d - 1) * parameters(cost, start, end) / microbatches
                    state = 4 * parameters(cost, start, end)
                    kept = float(cost.activation_bytes_L[start:end].sum())
                    entering = cost.model.bytes_into(start)
                    in_flight = min(-(-used // d), microbatches)
                    used -= d
                    if state + in_flight * kept > view.memory_bytes:
                        compute += float(cost.forward_ms_L[start:end].sum()) / view.speed
                        if state + in_flight * entering + kept > view.memory_bytes:
                            return float("inf")
                    times.append(compute / d + (sent / d + sync / d) / rate)
                return max(times)

            splits = all_splits(len(cost.forward_ms_L), view.num_devices, use_all=False)
            expected = min(bottleneck(split) for split in splits)
            if np.isinf(expected):
                continue
            made = split_piper(cost, view, microbatches)
            assert made.objective_ms == pytest.approx(expected)
            as_split = [(s.layers.start, s.layers.stop, s.num_replicas) for s in made.stages]
            assert bottleneck(as_split) == pytest.approx(expected)
            compared += 1
        assert compared > 60


class TestAlpa:
    def test_equals_all_partitions_tried(self):
        for seed in range(120):
            rng = random.Random(seed)
            cost = (
                hosts_cost(rng, rng.randint(1, 2), rng.randint(1, 3))
                if seed % 2
                else random_cost(rng)
            )
            view, microbatches = view_cluster(cost), rng.randint(1, 8)
            sizes = submesh_sizes(view)
            per_host = len(view.hosts[0])

            def latency(split, cost=cost, view=view, per_host=per_host, microbatches=microbatches):
                times = []
                for start, end, d in split:
                    inside = d <= per_host
                    rate = view.inside_bytes_per_ms if inside else view.between_bytes_per_ms
                    reduce_ms = 2 * (d - 1) / d * parameters(cost, start, end) / rate
                    compute = work(cost, start, end) / view.speed / d
                    times.append(compute + reduce_ms / microbatches)
                return sum(times) + (microbatches - 1) * max(times)

            splits = all_splits(len(cost.forward_ms_L), view.num_devices, use_all=True)
            allowed = [split for split in splits if all(d in sizes for _, _, d in split)]
            expected = min(latency(split) for split in allowed)
            made = split_alpa(cost, view, microbatches)
            assert made.objective_ms == pytest.approx(expected)
            as_split = [(s.layers.start, s.layers.stop, s.num_replicas) for s in made.stages]
            assert latency(as_split) == pytest.approx(expected)


def latency_in_words(forward, backward, reduce, microbatches):
    """The paper's latency, term by term."""
    last = len(forward) - 1
    pivot = last

    def steady(s):
        return (microbatches - 1) * (forward[s] + backward[s])

    for s in range(last - 1, -1, -1):
        between = sum(forward[a] + backward[a] for a in range(s + 1, pivot))
        if steady(s) > steady(pivot) + between:
            pivot = s
    ends = [
        reduce[s] + sum(backward[s : pivot + 1])
        if s <= pivot
        else reduce[s] - sum(backward[pivot : s + 1])
        for s in range(last + 1)
    ]
    return sum(forward[: pivot + 1]) + steady(pivot) + max(ends)


class TestDapple:
    def test_the_latency_equals_its_terms(self):
        for seed in range(300):
            rng = random.Random(seed)
            size = rng.randint(1, 7)
            rows = [[rng.uniform(0, 3) for _ in range(size)] for _ in range(3)]
            microbatches = rng.randint(1, 12)
            found = pipeline_latency_ms(*(np.array([row]) for row in rows), microbatches)
            assert found[0] == pytest.approx(latency_in_words(*rows, microbatches))

    def test_in_one_host_the_program_equals_all_partitions_tried(self):
        for seed in range(60):
            rng = random.Random(seed)
            cost = hosts_cost(rng, 1, rng.randint(2, 6))
            view = view_cluster(cost)
            size = rng.randint(1, view.num_devices // 2)
            max_groups = view.num_devices // size

            def bottleneck(split, size=size, cost=cost, view=view):
                times = [work(cost, start, end) / (groups * size) for start, end, groups in split]
                rate = view.inside_bytes_per_ms
                times += [2 * crossing(cost, start) / rate for start, _, _ in split[1:]]
                return max(times)

            found = least_bottleneck_splits(cost, view, size, max_groups)
            for groups in range(2, max_groups + 1):
                splits = all_splits(len(cost.forward_ms_L), groups, use_all=True)
                expected = min(bottleneck(split) for split in splits)
                made = [
                    (s.layers.start, s.layers.stop, s.num_replicas // size) for s in found[groups]
                ]
                assert bottleneck(made) == pytest.approx(expected)

    def test_kernel_equals_the_plain_program(self):
        """On hosts of different sizes, with models of any length; equal to the last bit."""
        num_found = 0
        for seed in range(60):
            rng = random.Random(seed)
            sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
            groups = [
                HostGroup(count=1, devices=size, bandwidth_gb_per_s=rng.uniform(1, 20))
                for size in sizes
            ]
            cluster = expand_hosts("hosts", groups, between_hosts_gb_per_s=rng.uniform(0.2, 5))
            cost = CostModel(random_model(rng, rng.randint(1, 12)), cluster)
            view = view_cluster(cost)
            asked = (rng.randint(1, 3), rng.randint(1, view.num_devices + 1))
            found = least_bottleneck_splits(cost, view, *asked)
            assert found == PlacementProgram(cost, view, *asked).solve()
            num_found += len(found)
        assert num_found > 100

    def test_no_split_in_two_has_less_latency(self):
        for seed in range(40):
            rng = random.Random(seed)
            cost = hosts_cost(rng, 2, rng.randint(1, 3))
            view, microbatches = view_cluster(cost), rng.randint(1, 8)
            per_host, total = len(view.hosts[0]), view.num_devices
            made = split_dapple(cost, view, microbatches)
            inside, between = view.inside_bytes_per_ms, view.between_bytes_per_ms
            num_layers = len(cost.forward_ms_L)
            for cut in range(1, num_layers):
                for ahead in range(1, total):
                    # Filled host by host: the stage behind spans hosts if the front leaves any of
                    # the first host free; else it is alone in the second one.
                    spans = ahead < per_host
                    outside = min(ahead, per_host) / ahead
                    per_byte = (
                        1 / between if spans else max(outside / between, (1 - outside) / inside)
                    )
                    sent = crossing(cost, cut) * per_byte
                    forward = [
                        cost.forward_ms_L[:cut].sum() / ahead,
                        sent,
                        cost.forward_ms_L[cut:].sum() / (total - ahead),
                    ]
                    backward = [
                        cost.backward_ms_L[:cut].sum() / ahead,
                        sent,
                        cost.backward_ms_L[cut:].sum() / (total - ahead),
                    ]
                    behind = total - ahead
                    rates = [
                        inside if ahead <= per_host else between,
                        inside if behind <= per_host else between,
                    ]
                    sizes = [(ahead, (0, cut)), (behind, (cut, num_layers))]
                    reduces = [
                        2 * (n - 1) / n * parameters(cost, *span) / rate
                        for (n, span), rate in zip(sizes, rates, strict=True)
                    ]
                    reduce = [reduces[0], 0.0, reduces[1]]
                    latency = latency_in_words(forward, backward, reduce, microbatches)
                    assert made.objective_ms <= latency * (1 + 1e-9) + 1e-12

    def test_devices_are_used_once(self):
        for seed in range(40):
            rng = random.Random(seed)
            cost = hosts_cost(rng, rng.randint(1, 4), rng.randint(1, 4), max_layers=8)
            view = view_cluster(cost)
            for size in range(1, view.num_devices // 2 + 1):
                found = least_bottleneck_splits(cost, view, size, view.num_devices // size)
                for groups, stages in found.items():
                    used = [d for stage in stages for d in stage.devices]
                    assert len(set(used)) == len(used) == groups * size
                    assert [s.layers.start for s in stages[1:]] == [
                        s.layers.stop for s in stages[:-1]
                    ]
