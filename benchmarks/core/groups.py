"""How long one iteration of a plan with groups takes to simulate.

8 groups with 32 stages, 32 microbatches, backwards cut in two: 3,072 blocks, 1,984 transfers.
"""

import time

import numpy as np

from pipeplan import _core
from pipeplan.group_costs import GroupCosts
from pipeplan.pipeline import pack_codes

GROUPS, STAGES, MICROBATCHES = 8, 32, 32
REPEATS, TIMES = 7, 50


def make_costs(*, half_duplex: bool) -> GroupCosts:
    """Stages go round the groups; every stage takes about as long as the others."""
    rng = np.random.default_rng(0)
    lengths = rng.uniform(1.0, 1.2, size=(STAGES, 4))
    lengths[:, 1] = lengths[:, 2] + lengths[:, 3]
    return GroupCosts(
        group_of_S=np.arange(STAGES, dtype=np.int32) % GROUPS,
        length_ms_S4=lengths,
        recompute_ms_S=np.zeros(STAGES),
        send_forward_ms_C=np.full(STAGES - 1, 0.1),
        send_backward_ms_C=np.full(STAGES - 1, 0.1),
        part_ms_S=np.zeros(STAGES),
        num_parts_S=np.zeros(STAGES, dtype=np.int32),
        half_duplex=half_duplex,
    )


def make_orders() -> list[np.ndarray]:
    """All forwards of a group, stage by stage, then its backwards from the last stage on."""
    orders = []
    for group in range(GROUPS):
        mine = np.arange(group, STAGES, GROUPS)
        every = np.arange(MICROBATCHES)
        forwards = [pack_codes(stage, 0, every) for stage in mine]
        backwards = [
            np.stack([pack_codes(stage, 2, every), pack_codes(stage, 3, every)], axis=1).ravel()
            for stage in mine[::-1]
        ]
        orders.append(np.concatenate([*forwards, *backwards]))
    return orders


def best_us(run, *arguments) -> float:
    """The best of some repetitions, in microseconds a call."""
    best = float("inf")
    for _ in range(REPEATS):
        began_s = time.process_time()
        for _ in range(TIMES):
            run(*arguments)
        best = min(best, (time.process_time() - began_s) / TIMES)
    return 1e6 * best


def main() -> None:
    orders = make_orders()
    codes, sizes = np.concatenate(orders), [len(order) for order in orders]
    for half_duplex in (False, True):
        costs = make_costs(half_duplex=half_duplex).for_kernels()
        name = "half" if half_duplex else "full"
        arguments = (costs, MICROBATCHES, codes, sizes)
        alone_us, whole_us = (
            best_us(_core.group_time, *arguments),
            best_us(_core.run_groups, *arguments),
        )
        print(f"{name} duplex: time alone {alone_us:.0f} us, whole timeline {whole_us:.0f} us")


if __name__ == "__main__":
    main()
