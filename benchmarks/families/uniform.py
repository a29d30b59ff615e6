"""Uniform chains against published schedulers at the same memory: are our plans as fast?

Layers are half stages of equal length, a device is a group. The goals are the better of what the
authors' schedulers reach (Qi et al. 2023 and 2024) and an earlier prototype of ours.
"""

import argparse
import time

from pipeplan.cluster import Cluster, Device
from pipeplan.planning.door import plan
from pipeplan.profile import LayerProfile, ModelProfile

NAMES = ("zb-h1", "zb-v", "v-half", "v-min")
# Forward, input gradient, weight gradient and transfer of a stage in ms; then by groups and
# microbatches the goal of each name.
GOALS = {
    (10, 10, 10, 0): {
        (4, 8): (270, 255, 265, 295),
        (8, 16): (550, 515, 565, 615),
        (8, 64): (1990, 1955, None, None),
        (16, 32): (1110, 1035, 1165, 1255),
        (16, 64): (2070, 1995, None, None),
    },
    (10, 10, 10, 2): {
        (4, 8): (294, 274, 301, 367),
        (8, 16): (606, 585, 661, 827),
        (8, 32): (1086, 1065, 1141, 1471),
    },
    (10, 12, 6, 1): {(4, 8): (284, 256, 282, 347), (8, 16): (588, 527, 623, 759)},
}
ACTIVATION_BYTES, OUTPUT_BYTES = 10**8, 10**6


def half_stages(name: str, groups: int) -> int:
    """How many half stages of a microbatch a group may hold."""
    whole = {"v-half": (groups + 2) // 2, "v-min": (groups + 4) // 3}
    return 2 * whole.get(name, groups)


def uniform_model(costs: tuple[int, int, int, int], groups: int) -> ModelProfile:
    """Two layers for each group."""
    forward, backward, weight, send = costs
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            forward_ms=forward / 2,
            backward_ms=(backward + weight) / 2,
            weight_grad_ms=weight / 2,
            output_bytes=OUTPUT_BYTES if send else 0,
            parameter_bytes=0,
            activation_bytes=ACTIVATION_BYTES,
        )
        for number in range(2 * groups)
    )
    return ModelProfile(name="uniform", microbatch_size=1, layers=layers)


def uniform_cluster(send_ms: float, groups: int, room: int) -> Cluster:
    """Devices on one switch, with room for so many half stages."""
    gb_per_s = OUTPUT_BYTES / 1e6 / send_ms if send_ms else 1000.0
    memory_gb = room * ACTIVATION_BYTES / 1e9 * (1 + 1e-9)
    return Cluster(
        name="uniform",
        devices=tuple(Device(name=f"d{n}", memory_gb=memory_gb) for n in range(groups)),
        bandwidth_gb_per_s=tuple((gb_per_s,) * groups for _ in range(groups)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    num_missed = num_cells = 0
    for costs, rows in GOALS.items():
        for (groups, microbatches), goals in rows.items():
            for name, goal_ms in zip(NAMES, goals, strict=True):
                if goal_ms is None:
                    continue
                began = time.process_time()
                found = plan(
                    uniform_model(costs, groups),
                    uniform_cluster(costs[3], groups, half_stages(name, groups)),
                    microbatches,
                    positions=1 if name == "zb-h1" else 2,
                    split_backward=True,
                    effort=given.effort,
                    num_threads=given.threads,
                )
                is_missed = found.iteration_ms > goal_ms * (1 + 1e-9)
                num_cells, num_missed = num_cells + 1, num_missed + is_missed
                print(
                    f"{costs} {groups:2} groups {microbatches:2} microbatches {name:6} goal"
                    f" {goal_ms:5} found {found.iteration_ms:7.1f}"
                    f" {time.process_time() - began:5.2f} s{' missed' if is_missed else ''}",
                    flush=True,
                )
    print(f"{num_cells - num_missed} of {num_cells} cells reached, effort {given.effort:g}")


if __name__ == "__main__":
    main()
