"""What cannot be is refused by name, each part of it: a kernel never runs on it."""

import numpy as np
import pytest

from pipeplan import _core

NO_NUMBERS = (-1.0, float("nan"), float("inf"), 1e101)
LAYERS = ("forward_ms", "backward_ms", "output_bytes", "gradient_bytes", "parameter_bytes")


def arguments(**changes):
    """Three devices, two layers."""
    made = {name: np.ones(2) for name in LAYERS}
    made |= {"speed": np.ones(3), "bytes_per_ms": np.ones((3, 3)), "latency_ms": np.ones((3, 3))}
    made |= {"half_duplex": False, "num_microbatches": 2}
    made |= {"microbatch_size": 6, "max_replicas": 3}
    return made | changes


def instance(**changes) -> _core.Instance:
    return _core.Instance(**arguments(**changes))


def changed(array: np.ndarray, value: float) -> np.ndarray:
    """With this value in one place, off the diagonal."""
    copy = array.copy()
    copy.flat[1] = value
    return copy


class TestInstances:
    @pytest.mark.parametrize("name", [*LAYERS, "speed", "bytes_per_ms", "latency_ms"])
    def test_numbers_that_cannot_be(self, name):
        for value in NO_NUMBERS:
            with pytest.raises(ValueError, match=name):
                instance(**{name: changed(arguments()[name], value)})

    @pytest.mark.parametrize("name", [*LAYERS, "speed", "bytes_per_ms", "latency_ms"])
    def test_too_many_or_too_few(self, name):
        array = arguments()[name]
        for wrong in (array[:-1], np.concatenate([array, array])):
            with pytest.raises(ValueError, match=r"has \d values|a row and a column"):
                instance(**{name: wrong.copy()})

    @pytest.mark.parametrize(
        ("name", "array"),
        [
            ("speed", changed(np.ones(3), 0.0)),
            ("bytes_per_ms", changed(np.ones((3, 3)), 1e-61)),
        ],
    )
    def test_what_would_divide_by_almost_nothing(self, name, array):
        with pytest.raises(ValueError, match=name):
            instance(**{name: array})

    @pytest.mark.parametrize("name", ["num_microbatches", "max_replicas"])
    def test_counts(self, name):
        for count in (0, -1, 2**20 + 1 if name == "num_microbatches" else 0):
            with pytest.raises(ValueError, match=name):
                instance(**{name: count})

    def test_no_layer_and_no_device(self):
        with pytest.raises(ValueError, match="layers"):
            instance(**{name: np.ones(0) for name in LAYERS})
        with pytest.raises(ValueError, match="devices"):
            instance(speed=np.ones(0), bytes_per_ms=np.ones((0, 0)), latency_ms=np.ones((0, 0)))

    def test_what_stands_on_the_diagonal_counts_for_nothing(self):
        odd = np.ones((3, 3))
        np.fill_diagonal(odd, [np.nan, -1.0, 7.0])
        made = instance(bytes_per_ms=odd, latency_ms=odd)
        assert _core.device_classes(made) == [0, 0, 0]
        sizes = np.array([1, 2, 3], dtype=np.int32)
        assert _core.relaxed_bound(made, sizes, 4, np.inf, 1) == _core.relaxed_bound(
            instance(), sizes, 4, np.inf, 1
        )

    def test_orders(self):
        for order in ([0, 0], [3], [-1], []):
            with pytest.raises(ValueError, match=r"order|devices"):
                instance().on_devices(order)

    def test_an_order_keeps_everything_else(self):
        """Devices 2 and 0 of three: links in both directions, duplex and the limit on replicas."""
        rates = np.arange(1.0, 10.0).reshape(3, 3)
        for half, most in ((False, 1), (True, 2)):
            whole = instance(
                bytes_per_ms=rates,
                latency_ms=rates,
                gradient_bytes=np.zeros(2),
                half_duplex=half,
                num_microbatches=8,
                max_replicas=most,
            )
            part = whole.on_devices([2, 0])
            apart = _core.PlacedPlan(part, [1, 2], [[0], [1]])
            same = _core.PlacedPlan(whole, [1, 2], [[2], [0]])
            assert _core.rule_times(part, apart, np.inf) == _core.rule_times(whole, same, np.inf)
            both = _core.PlacedPlan(part, [2], [[0, 1]])
            assert bool(_core.rule_times(part, both, np.inf)) == (most == 2)
        # One channel that carries 1 + 2 in half duplex takes longer than with full duplex.
        times = [
            _core.rule_times(made, _core.PlacedPlan(made, [1, 2], [[0], [1]]), np.inf)
            for made in (
                instance(
                    half_duplex=half, num_microbatches=8, output_bytes=np.full(2, 5.0)
                ).on_devices([1, 2])
                for half in (False, True)
            )
        ]
        assert max(times[0]) < min(times[1])


class TestPipelineCosts:
    SIZES = (2, 2, 1, 1, 2)

    def costs(self, place: int | None = None, array: np.ndarray | None = None):
        arrays = [np.ones(size) for size in self.SIZES]
        if place is not None:
            arrays[place] = array
        return _core.PipelineCosts(*arrays, False)

    @pytest.mark.parametrize("place", range(5))
    def test_numbers_and_sizes(self, place):
        for value in NO_NUMBERS:
            with pytest.raises(ValueError, match="finite time"):
                self.costs(place, np.array([1.0] * (self.SIZES[place] - 1) + [value]))
        for size in (self.SIZES[place] - 1, self.SIZES[place] + 1):
            with pytest.raises(ValueError, match="values, not"):
                self.costs(place, np.ones(size))

    def test_microbatches(self):
        caps = np.ones(2, dtype=np.int32)
        for count in (0, -1, 2**20 + 1):
            with pytest.raises(ValueError, match="num_microbatches"):
                _core.plan_bound(self.costs(), count, caps)
        many = _core.PipelineCosts(
            np.ones(1000), np.ones(1000), np.ones(999), np.ones(999), np.ones(1000), False
        )
        with pytest.raises(ValueError, match="num_microbatches"):  # too many blocks in all
            _core.plan_bound(many, 2**20, np.ones(1000, dtype=np.int32))

    @pytest.mark.parametrize(
        "row", [[0, 0, -1, -2], [0, 1, -1, -1], [0, 1, -1, -3], [0, 2, -1, -2], [0, 1, -1, 2**30]]
    )
    def test_orders(self, row):
        codes = np.array([[0, 1, -1, -2], row], dtype=np.int32)
        with pytest.raises(ValueError, match="codes: stage 1"):
            _core.run_schedule(self.costs(), codes)

    def test_caps(self):
        for caps in ([0, 1], [1, -1], [1], [1, 1, 1]):
            array = np.array(caps, dtype=np.int32)
            with pytest.raises(ValueError, match="caps"):
                _core.run_list(self.costs(), 2, 0, array)
            with pytest.raises(ValueError, match="caps"):
                _core.plan_bound(self.costs(), 2, array)
        with pytest.raises(ValueError, match="preference"):
            _core.run_list(self.costs(), 2, 3, np.ones(2, dtype=np.int32))


class TestPlanning:
    @pytest.mark.parametrize("sizes", [[], [0, 1], [1, 1], [2, 1], [1, 4]])
    def test_sizes(self, sizes):
        array = np.array(sizes, dtype=np.int32)
        with pytest.raises(ValueError, match="sizes"):
            _core.plan_on_order(instance(), array, 4, np.inf, 1, 1)
        with pytest.raises(ValueError, match="sizes"):
            _core.relaxed_bound(instance(), array, 4, np.inf, 1)

    def test_groups_end_at_all_devices(self):
        with pytest.raises(ValueError, match="buckets"):
            _core.relaxed_bound(instance(), np.array([1, 2], dtype=np.int32), 4, np.inf, 1)

    @pytest.mark.parametrize("classes", [[0, 2, 2], [1, 1, 1], [0, 0], [0, 0, -1], [0, 0, 3]])
    def test_classes(self, classes):
        with pytest.raises(ValueError, match="class_of"):
            _core.plan_on_sets(instance(), classes, 4, np.inf, 1, 1)

    def test_numbers(self):
        sizes = np.array([1, 2, 3], dtype=np.int32)
        nan = float("nan")
        for capacity, limit_ms, num_best, threads, name in (
            (0, 1.0, 1, 1, "capacity"),
            (17, 1.0, 1, 1, "capacity"),
            (4, nan, 1, 1, "limit_ms"),
            (4, 1.0, -1, 1, "num_best"),
            (4, 1.0, 1, 0, "num_threads"),
            (4, 1.0, 1, 1025, "num_threads"),
        ):
            with pytest.raises(ValueError, match=name):
                _core.plan_on_order(instance(), sizes, capacity, limit_ms, num_best, threads)
        with pytest.raises(ValueError, match="deadline"):
            _core.plan_on_order(instance(), sizes, 4, 1.0, 1, 1, nan)
        with pytest.raises(ValueError, match="max_levels"):
            _core.relaxed_bound(instance(), sizes, 4, 1.0, 1, max_levels=0)
        for max_stages in (0, 3):  # there are two layers
            with pytest.raises(ValueError, match="max_stages"):
                _core.partition(instance(), max_stages, np.inf, 1)

    def test_searches(self):
        made = instance()
        start = _core.PlacedPlan(made, [2], [[0]])
        for budget, target_ms, name in ((-1.0, 0.0, "budget"), (1e18, 0.0, "budget")):
            with pytest.raises(ValueError, match=name):
                _core.local_search(made, [start], 0, budget, target_ms, 1)
        with pytest.raises(ValueError, match="target_ms"):
            _core.local_search(made, [start], 0, 1.0, float("nan"), 1)
        for hottest in (0.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match="hottest"):
                _core.local_search(made, [start], 0, 1.0, 0.0, 1, hottest=hottest)
        for price in (-1.0, 1e4, float("nan")):
            with pytest.raises(ValueError, match="overflow_price"):
                _core.local_search(made, [start], 0, 1.0, 0.0, 1, overflow_price=price)

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
    def test_weights(self, value):
        with pytest.raises(ValueError, match="weights"):
            _core.min_cut(changed(np.ones((3, 3)), value))
