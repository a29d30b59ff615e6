"""A plan in, a measurement out.

>>> from pipeplan.testbed.door import Testbed
>>> with Testbed() as testbed:
...     measured = testbed.measure(plan)
"""

import contextlib
import math
import os
import selectors
import subprocess
import sys
import time
from typing import Any

import msgspec

from pipeplan.cluster import Cluster
from pipeplan.cost import CostModel
from pipeplan.documents.inputs import cluster_document, parse_cluster
from pipeplan.documents.plans import plan_document
from pipeplan.errors import InputError, RuntimeMismatchError
from pipeplan.pipeline import Kind, Plan
from pipeplan.replaying import simulate
from pipeplan.testbed.abilities import find_abilities
from pipeplan.testbed.measurement import Measurement
from pipeplan.testbed.orders import Answer, BlockPace, LinksOrder, Order, Way
from pipeplan.testbed.scaling import choose_scale, require_possible_sizes, scale_plan
from pipeplan.testbed.topology import Topology, find_topology, topology_of
from pipeplan.user_code import find_function

__all__ = ["Testbed"]

NUM_WARM_UPS = 2
"""The first step has no forecasts of its messages yet, and connections begin slowly."""
START_S, PATIENCE = 120.0, 20.0
"""How long to wait for an answer: this, and so many times as long as predicted."""
NURSERY = "pipeplan.testbed.nursery"
READ_BYTES = 1 << 16


def find_paces(plan: Plan, topology: Topology, time_factor: float) -> list[list[BlockPace]]:
    """How long each rank's blocks take here.

    Each replica takes its own time. In the cost model, all take that of the slowest.
    """
    cost = CostModel(plan.model, plan.cluster)
    paces_of: dict[int, list[BlockPace]] = {}
    for number, stage in enumerate(plan.stages):
        weight_ms = [plan.model.layers[layer].weight_grad_ms or 0.0 for layer in stage.layers]
        times = zip(
            stage.devices,
            stage.device_shares,
            cost.device_forward_ms(stage),
            cost.device_backward_ms(stage),
            strict=True,
        )
        for device, share, forward_ms, backward_ms in times:
            own_ms = sum(weight_ms) * share / plan.cluster.devices[device].speed
            all_ms = {
                Kind.FORWARD: forward_ms,
                Kind.BACKWARD: backward_ms,
                Kind.INPUT_GRADIENT: max(0.0, backward_ms - own_ms),
                Kind.WEIGHT_GRADIENT: own_ms,
            }
            seconds = {str(kind): ms * time_factor / 1e3 for kind, ms in all_ms.items()}
            paces_of.setdefault(device, []).append(BlockPace(stage=number, seconds=seconds))
    return [paces_of[device] for device in topology.devices]


def _require_options(time_factor: float | None, build: str | None) -> None:
    """Refuse at once what every rank would stumble over later.

    Raises:
        InputError: no finite factor, or a function that does not exist.
    """
    if time_factor is not None and not 0 < time_factor < math.inf:
        raise InputError(f"time_factor: is {time_factor}; give a finite number above 0")
    if build is not None:
        for name in (build, *(f"{build.partition(':')[0]}:{n}" for n in ("loss_fn", "make_batch"))):
            find_function(name, "--real")


def _require_measurable(plan: Plan) -> None:
    """Refuse what the emulated model does not do.

    Raises:
        InputError: it shares the optimizer out.
    """
    if plan.shard_optimizer:
        raise InputError(
            "shard_optimizer: the emulated model has no optimizer to share out, and the runtime"
            " moves more than the plan counts; measure a plan without --shard-optimizer"
        )


class Testbed:
    """Runs plans on emulated clusters, one after another. Nothing is left behind when it closes."""

    __test__ = False  # for pytest: its name begins like a test's

    def __init__(self, way: Way | None = None) -> None:
        """`way` is the best one that works here, by default.

        Raises:
            RuntimeMismatchError: torch is not installed, or the way that is asked does not work.
        """
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise RuntimeMismatchError("testbed: needs torch; pip install 'pipeplan[torch]'")
        self._abilities = find_abilities()
        self.way = self._abilities.way if way is None else way
        if self.way is Way.NAMESPACES and self._abilities.failed_step:
            raise RuntimeMismatchError(
                f"testbed: namespaces do not work here ({self._abilities.failed_step}); use pacing"
            )
        self.note = ""
        """One line, if the machine does not allow namespaces."""
        if self._abilities.failed_step:
            self.note = (
                f"no network namespaces here ({self._abilities.failed_step}); pacing gloo's sockets"
                " over loopback instead"
            )
        self._nursery: subprocess.Popen[bytes] | None = None

    def measure(
        self,
        plan: Plan,
        *,
        num_iterations: int = 5,
        time_factor: float | None = None,
        whole_samples: bool = False,
        build: str | None = None,
    ) -> Measurement:
        """Run a plan, and return its times.

        Args:
            plan: what to run.
            num_iterations: how many are measured, after warm-ups.
            time_factor: everything lasts so many times as long; by default as the machine needs.
            whole_samples: divide the plan's samples, as training does, instead of the exact shares.
            build: MODULE:FUNCTION of a model to train really; blocks are padded to their times.

        Raises:
            InputError: the plan cannot be emulated.
            RuntimeMismatchError: a rank has failed.
        """
        _require_options(time_factor, build)
        timeline = simulate(plan)
        _require_measurable(plan)
        if not timeline.iteration_ms:
            raise InputError("plan: its iteration takes no time, so there is nothing to measure")
        if build is None:
            require_possible_sizes(plan)
        scale = choose_scale(
            plan,
            timeline,
            time_factor=time_factor,
            keeps_bytes=build is not None,
            whole_samples=whole_samples or build is not None,
        )
        scaled = scale_plan(plan, scale)
        topology = find_topology(scaled)
        self._require_way(topology)
        order = Order(
            plan=plan_document(scaled),
            paces=find_paces(plan, topology, scale.time_factor),
            way=self.way,
            num_warm_ups=NUM_WARM_UPS,
            num_iterations=num_iterations,
            build=build,
        )
        seconds = timeline.iteration_ms * scale.time_factor / 1e3
        limit_s = START_S + PATIENCE * (NUM_WARM_UPS + num_iterations) * seconds
        answer = self._ask(order, limit_s)
        if answer.problem:
            raise RuntimeMismatchError(f"testbed: {answer.problem}")
        return Measurement(
            plan=plan,
            timeline=timeline,
            scale=scale,
            way=self.way,
            note=self.note,
            ranks=tuple(answer.ranks),
        )

    def measure_links(
        self, cluster: Cluster, *, seconds: float = 60.0, one_at_a_time: bool = False
    ) -> tuple[Cluster, tuple[str, ...]]:
        """Emulate a cluster as it is, and measure its links as `pipeplan.measure.links` does.

        Returns the cluster as it was measured, and notes. With pacing, all devices are on this
        host. Latencies are not emulated: they are this machine's.

        Raises:
            InputError: the cluster cannot be emulated.
            RuntimeMismatchError: a rank has failed.
        """
        topology = topology_of(cluster, range(cluster.num_devices))
        self._require_way(topology)
        order = LinksOrder(
            cluster=cluster_document(cluster),
            way=self.way,
            seconds=seconds,
            one_at_a_time=one_at_a_time,
        )
        answer = self._ask(order, START_S + PATIENCE * seconds)
        if answer.problem:
            raise RuntimeMismatchError(f"testbed: {answer.problem}")
        return parse_cluster(answer.cluster), tuple(answer.notes)

    def _require_way(self, topology: Topology) -> None:
        """Refuse shared links where nobody could limit them."""
        if topology.switches and self.way is Way.PACING:
            raise RuntimeMismatchError(
                "cluster: has links that devices share; pacing cannot emulate them, and namespaces"
                f" do not work here ({self._abilities.failed_step or 'they were not asked for'})"
            )

    def close(self) -> None:
        """End all processes, and return when they are gone."""
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        nursery.kill()
        assert nursery.stdout is not None
        assert nursery.stdin is not None
        nursery.stdout.read()  # every process below the nursery has it open, until it ends
        with contextlib.suppress(BrokenPipeError):
            nursery.stdin.close()
        nursery.stdout.close()
        nursery.wait()

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _ask(self, order: Order | LinksOrder, limit_s: float) -> Answer:
        """The nursery's answer; whatever goes wrong meanwhile ends it."""
        try:
            if self._nursery is None:
                self._nursery = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", NURSERY, str(os.getpid()), self._abilities.privilege],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for this process only
                )
            assert self._nursery.stdin is not None
            self._nursery.stdin.write(msgspec.json.encode(order) + b"\n")
            self._nursery.stdin.flush()
            return msgspec.json.decode(self._read_line(limit_s), type=Answer)
        except BaseException:
            self.close()
            raise

    def _read_line(self, limit_s: float) -> bytes:
        assert self._nursery is not None
        assert self._nursery.stdout is not None
        number, line = self._nursery.stdout.fileno(), b""
        deadline_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(number, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeMismatchError(
                        f"testbed: no answer within {limit_s:.0f} s; is the machine overloaded?"
                    )
                part = os.read(number, READ_BYTES)
                if not part:
                    raise RuntimeMismatchError("testbed: its processes have ended unexpectedly")
                line += part
        return line
