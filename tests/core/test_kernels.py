"""Kernels with wrong arguments: exceptions only, never a crash, a hang or another process's end."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from instances import random_cluster, random_model
from pipeplan import _core
from pipeplan.cost import CostModel

NASTY = (0.0, -1.0, np.nan, np.inf, -np.inf, 1e-320, 1e308, 1e20)


def instance(num_layers=4, num_devices=3, num_microbatches=4, seed=0) -> _core.Instance:
    rng = random.Random(seed)
    cost = CostModel(random_model(rng, num_layers), random_cluster(rng, num_devices))
    return cost.kernel_instance(num_microbatches)


def wrong_floats(rng, shape):
    values = rng.choice(np.array([0.5, 1.0, 3.0]), size=shape)
    if values.size and rng.random() < 0.6:
        values.flat[rng.integers(values.size)] = rng.choice(NASTY)
    return values


def wrong_shape(rng, *usual):
    return tuple(int(max(0, n + rng.choice([0, 0, 0, 0, -1, 1]))) for n in usual)


def wrong_ints(rng, size):
    most = rng.choice([2, 5, 2**31 - 1])
    return rng.integers(-2 if rng.random() < 0.5 else 0, most, size=size).astype(np.int32)


def fuzz_once(rng) -> None:
    """One call of some kernel with arguments that are often wrong."""
    L, D, S, M = (int(n) for n in rng.integers(1, 5, size=4))
    number = lambda *choices: rng.choice(choices)  # noqa: E731
    made = instance(L, D, M, seed=int(rng.integers(50)))
    sizes = wrong_ints(rng, wrong_shape(rng, 3))
    limit_ms = float(number(np.inf, 1.0, 0.0, -1.0, np.nan, 1e308))
    threads = int(number(1, 2, 2, 0, -3, 10**6))
    capacity = int(number(1, 8, 16, 0, 17, -1))

    def costs():
        return _core.PipelineCosts(
            wrong_floats(rng, wrong_shape(rng, S)),
            wrong_floats(rng, wrong_shape(rng, S)),
            wrong_floats(rng, wrong_shape(rng, S - 1)),
            wrong_floats(rng, wrong_shape(rng, S - 1)),
            wrong_floats(rng, wrong_shape(rng, S)),
            bool(number(True, False)),
        )

    def placed():
        ends = [int(e) for e in rng.integers(-1, L + 2, size=S)]
        if rng.random() < 0.5:
            ends = sorted(set(ends))
        return _core.PlacedPlan(
            made, ends, [[int(u) for u in rng.integers(-1, D + 1, size=2)] for _ in ends]
        )

    def new_instance():
        per_layer = [wrong_floats(rng, wrong_shape(rng, L)) for _ in range(5)]
        names = ("forward_ms", "backward_ms", "output_bytes", "gradient_bytes", "parameter_bytes")
        return _core.Instance(
            **dict(zip(names, per_layer, strict=True)),
            speed=wrong_floats(rng, wrong_shape(rng, D)),
            bytes_per_ms=wrong_floats(rng, wrong_shape(rng, D, D)),
            latency_ms=wrong_floats(rng, wrong_shape(rng, D, D)),
            half_duplex=bool(number(True, False)),
            num_microbatches=int(number(M, 0, -1, 2**31 - 1, 2**40)),
            microbatch_size=int(number(4, 1, 0, -1, 2**31 - 1)),
            max_replicas=int(number(D, 0, 1, -5)),
        )

    calls = [
        lambda: _core.run_schedule(costs(), wrong_ints(rng, wrong_shape(rng, S, 2 * M))),
        lambda: _core.run_list(
            costs(), int(number(M, 0, -1, 2**40)), int(number(0, 1, 2, 3, -1)), sizes
        ),
        lambda: _core.plan_bound(costs(), int(number(M, 0, 2**40)), sizes),
        new_instance,
        lambda: made.on_devices([int(u) for u in rng.integers(-1, D + 1, size=D)]),
        lambda: _core.rule_times(instance(L + 1, D), placed(), limit_ms),
        lambda: _core.rule_times(made, placed(), limit_ms),
        lambda: _core.min_cut(wrong_floats(rng, wrong_shape(rng, D, D))),
        lambda: _core.least_sum(
            wrong_floats(rng, wrong_shape(rng, 3, L + 1, L + 1)), sizes, D, limit_ms
        ),
        lambda: _core.place_groups(
            wrong_floats(rng, wrong_shape(rng, L + 1, L + 1)), wrong_floats(rng, (L + 1,)),
            [[0] * int(number(1, 2, 0)), [1, 2]], limit_ms, float(number(1, 0, np.nan)),
            int(number(1, 2, 0, -1)), int(number(2, 3, 0, 40000)),
        ),
        lambda: _core.partition(made, int(number(1, 2, 0, -1, 99)), limit_ms, threads),
        lambda: _core.plan_on_order(made, sizes, capacity, limit_ms, int(number(0, -1)), threads),
        lambda: _core.plan_on_sets(
            made, wrong_ints(rng, wrong_shape(rng, D)).tolist(), capacity, limit_ms, 2, threads
        ),
        lambda: _core.relaxed_bound(
            made, sizes, capacity, limit_ms, threads, max_levels=int(number(1, 9, 0, -1))
        ),
        lambda: _core.local_search(
            made, [placed()], int(number(0, 2**64 - 1, -1, 2**70)), float(number(1e4, -1, np.nan)),
            limit_ms, threads,
        ),
    ]  # fmt: skip
    with suppress(ValueError, TypeError, OverflowError):
        calls[int(rng.integers(len(calls)))]()


def fuzz(seed: int, count: int) -> int:
    """How many calls ended without an exception; anything but a Python exception ends the test."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        fuzz_once(rng)
    return count


def test_wrong_arrays_raise_exceptions_only():
    """In a process of its own, since a crash would take the tests with it."""
    here = Path(__file__).parent
    script = f"""
        import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]
        from test_kernels import fuzz
        print(fuzz(0, 3000))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3000\n", "")


class TestPlacedPlans:
    def test_what_is_no_plan_is_refused(self):
        made = instance(4, 3)
        for ends, devices in (
            ([], []),
            ([4], [[]]),
            ([4], [[3]]),
            ([4], [[-1]]),
            ([3], [[0]]),
            ([2, 2, 4], [[0], [1], [2]]),
            ([2, 4], [[0], [0]]),
            ([2, 4], [[0, 0], [1]]),
            ([2, 4], [[0]]),
        ):
            with pytest.raises(ValueError, match=r"end_layer|devices|stages"):
                _core.PlacedPlan(made, ends, devices)

    def test_a_plan_for_another_instance_is_refused(self):
        placed = _core.PlacedPlan(instance(4, 3), [4], [[0]])
        with pytest.raises(ValueError, match="another instance"):
            _core.rule_times(instance(5, 3), placed, np.inf)
        with pytest.raises(ValueError, match="another instance"):
            _core.local_search(instance(4, 4), [placed], 0, 1.0, 0.0, 1)


def test_classes_that_cannot_be_exchanged_are_refused():
    made = instance(4, 3)  # random links: all devices differ
    assert _core.device_classes(made) == [0, 1, 2]
    with pytest.raises(ValueError, match="cannot be exchanged"):
        _core.plan_on_sets(made, [0, 0, 1], 8, np.inf, 1, 1)
    with pytest.raises(ValueError, match="out of range"):
        _core.plan_on_sets(made, [0, 1, 3], 8, np.inf, 1, 1)
    alone = instance(4, 2)
    with pytest.raises(ValueError, match="cannot be exchanged"):
        _core.plan_on_sets(alone, [1, 1], 8, np.inf, 1, 1)


def test_too_little_memory_is_an_exception_in_worker_threads_too():
    """Ended processes, not exceptions, were what a failed allocation in a thread gave."""
    script = """
        import resource
        import numpy as np
        from pipeplan import _core
        D, L = 150, 300
        made = _core.Instance(
            forward_ms=np.ones(L), backward_ms=np.ones(L), output_bytes=np.ones(L),
            gradient_bytes=np.ones(L), parameter_bytes=np.ones(L), speed=np.ones(D),
            bytes_per_ms=np.ones((D, D)), latency_ms=np.zeros((D, D)), half_duplex=False,
            num_microbatches=8, microbatch_size=8, max_replicas=D,
        )
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 60_000_000,) * 2)
        try:
            _core.plan_on_order(made, np.arange(1, D + 1, dtype=np.int32), 8, np.inf, 1, 2)
            print("done")
        except MemoryError:
            print("MemoryError")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, "MemoryError\n"), ended.stderr


@pytest.mark.parametrize("num_threads", [1, 2])
def test_ctrl_c_ends_a_kernel_within_half_a_second(num_threads):
    """Each kernel alone would go on for many seconds."""
    layers, devices = 600, 48
    rng = random.Random(0)
    model, cluster = random_model(rng, layers), random_cluster(rng, devices)
    made, sizes = (
        CostModel(model, cluster).kernel_instance(64),
        np.arange(1, devices + 1, dtype=np.int32),
    )
    alike = tuple(replace(device, speed=1.0) for device in cluster.devices)
    one_speed = CostModel(model, replace(cluster, devices=alike)).kernel_instance(64)
    start = _core.PlacedPlan(made, [layers], [[0]])
    many = 120  # with fewer devices the partition ends by itself in half a second
    large = CostModel(model, random_cluster(rng, many)).kernel_instance(64)
    for kernel in (
        lambda: _core.plan_on_order(made, sizes, 16, np.inf, 1, num_threads),
        lambda: _core.relaxed_bound(one_speed, sizes, 16, np.inf, num_threads),
        lambda: _core.local_search(made, [start] * 3, 0, 1e15, 0.0, num_threads),
        lambda: _core.partition(large, many, np.inf, num_threads),
    ):
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        began_s = time.monotonic()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            kernel()
        assert time.monotonic() - began_s < 0.2 + 0.5
        timer.join()
