"""What the kernels compute, in a few obvious lines each; slow, and right by reading."""

import itertools
from functools import cache

from pipeplan.cost import CostModel, PipelineCosts
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Stage


def cut_weight(weights, side) -> float:
    """The weight of all edges between the two sides of a cut."""
    vertices = range(len(weights))
    return sum(weights[u][v] for u in vertices for v in vertices if side[u] and not side[v])


def least_cut_weight(weights) -> float:
    """The lightest cut, over all of them."""
    rest = len(weights) - 1
    sides = itertools.product((0, 1), repeat=rest)
    return min(cut_weight(weights, (1, *side)) for side in sides if sum(side) < rest)


def compositions(total: int, parts: int):
    """All ways to write `total` as a sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = (*cuts, total)
        yield tuple(end - start for start, end in zip((0, *cuts), ends, strict=True))


def bottleneck_ms(cost: CostModel, stages: tuple[Stage, ...], num_microbatches: int) -> float:
    """The busiest stage or channel; infinite where a path is missing."""
    try:
        costs = cost.pipeline_costs(stages)
    except PlanFileError:
        return float("inf")
    work = num_microbatches * (costs.forward_ms_S + costs.backward_ms_S) + costs.all_reduce_ms_S
    return max([*work, *(num_microbatches * costs.channel_ms_C)])


def least_bottleneck_ms(
    cost: CostModel, order: tuple[int, ...], num_stages: int, num_microbatches: int
) -> float:
    """The best of all partitions into `num_stages` stages on a prefix of the order."""
    best = float("inf")
    for layer_counts in compositions(cost.model.num_layers, num_stages):
        for used in range(num_stages, len(order) + 1):
            for replica_counts in compositions(used, num_stages):
                stages = make_stages(order, layer_counts, replica_counts)
                best = min(best, bottleneck_ms(cost, stages, num_microbatches))
    return best


def make_stages(order, layer_counts, replica_counts) -> tuple[Stage, ...]:
    """Consecutive stages of these sizes."""
    layer_ends = itertools.accumulate(layer_counts)
    device_ends = itertools.accumulate(replica_counts)
    return tuple(
        Stage(
            layers=range(layer_end - layers, layer_end),
            devices=tuple(order[device_end - devices : device_end]),
        )
        for layers, devices, layer_end, device_end in zip(
            layer_counts, replica_counts, layer_ends, device_ends, strict=True
        )
    )


# ------------------------------------------------- the cost model, written from the contract


def shares_of(stage: Stage) -> list[float]:
    """x(u) of each device."""
    k = len(stage.devices)
    return [1 / k] * k if stage.shares is None else list(stage.shares)


def latency_of(cluster, sender: int, receiver: int) -> float:
    """In milliseconds."""
    given = cluster.latency_us
    return (given[sender][receiver] if isinstance(given, tuple) else given) / 1000


def block_times(model, cluster, stage: Stage) -> tuple[float, float]:
    """Rule 1: forward and backward of one microbatch."""
    slowest = 0.0
    for device, share in zip(stage.devices, shares_of(stage), strict=True):
        slowest = max(slowest, share / cluster.devices[device].speed)
    forward = backward = 0.0
    for index in stage.layers:
        forward += model.layers[index].forward_ms
        backward += model.layers[index].backward_ms
    if stage.recompute:
        backward += forward
    return forward * slowest, backward * slowest


def transfer_time(cluster, sender: Stage, receiver: Stage, num_bytes: float) -> float:
    """Rule 2: one microbatch from every device of the one to every device of the other."""
    longest = 0.0
    for u, x in zip(sender.devices, shares_of(sender), strict=True):
        for v, y in zip(receiver.devices, shares_of(receiver), strict=True):
            bytes_per_ms = cluster.bandwidth_gb_per_s[u][v] * 1e9 / 1000
            longest = max(longest, latency_of(cluster, u, v) + x * y * num_bytes / bytes_per_ms)
    return longest


def all_reduce_time(model, cluster, stage: Stage) -> float:
    """Rule 3."""
    k = len(stage.devices)
    if k == 1:
        return 0.0
    num_bytes = sum(model.layers[index].parameter_bytes for index in stage.layers)
    bandwidth, latency = float("inf"), 0.0
    for u in stage.devices:
        for v in stage.devices:
            if u != v:
                bandwidth = min(bandwidth, cluster.bandwidth_gb_per_s[u][v])
                latency = max(latency, latency_of(cluster, u, v))
    return 2 * (k - 1) / k * num_bytes / (bandwidth * 1e9 / 1000) + 2 * (k - 1) * latency


def memory_needs(model, stage: Stage, order) -> list[float]:
    """The gigabytes of each device of a stage that runs these blocks in this order."""
    in_flight = most = 0
    for block in order:
        in_flight += 1 if block.kind == "F" else -1
        most = max(most, in_flight)
    parameters = sum(model.layers[index].parameter_bytes for index in stage.layers)
    activations = sum(model.layers[index].activation_bytes for index in stage.layers)
    first = stage.layers[0]
    entering = model.layers[first - 1].output_bytes if first > 0 else model.input_bytes
    needs = []
    for share in shares_of(stage):
        need = parameters * (1 + model.optimizer_bytes_per_parameter_byte)
        if stage.recompute:
            need += most * entering * share + activations * share
        else:
            need += most * activations * share
        needs.append(need / 1e9)
    return needs


def pe_orders(costs: PipelineCosts, num_microbatches: int) -> list[list[int]]:
    """The order in which PE runs the blocks: forward m as m, backward m as -1 - m.

    One unsorted list of things under way; at each instant ends, then channels, then stages.
    """
    S, M = costs.num_stages, num_microbatches
    forward, backward = costs.forward_ms_S.tolist(), costs.backward_ms_S.tolist()
    lengths = [costs.send_forward_ms_C.tolist(), costs.send_backward_ms_C.tolist()]
    orders = [[] for _ in range(S)]
    has_forward = [set(range(M)) if n == 0 else set() for n in range(S)]
    has_backward = [set() for _ in range(S)]
    queues = {(c, d): [] for c in range(S - 1) for d in (0, 1)}
    sent = dict.fromkeys(queues, 0)
    under_way = []  # (end, what, where, code)
    now = 0.0
    while True:
        for item in [item for item in under_way if item[0] <= now + 1e-9]:
            under_way.remove(item)
            _, what, n, code = item
            if what == "block" and code >= 0 and n == S - 1:
                has_backward[n].add(code)
            elif what == "block" and code >= 0:
                queues[n, 0].append(code)
            elif what == "block" and n > 0:
                queues[n - 1, 1].append(code)
            elif what == 0:
                has_forward[n + 1].add(code)
            elif what == 1:
                has_backward[n].add(-1 - code)
        for c in range(S - 1):
            busy = [d for d in (0, 1) if any(i[1:3] == (d, c) for i in under_way)]
            wanted = [d for d in (0, 1) if queues[c, d] and d not in busy]
            if costs.half_duplex:
                if len(wanted) == 2:
                    backward_first = sent[c, 1] + 4 * (S - 1) - 2 * c - 1 <= sent[c, 0] + 2 * c + 1
                    wanted = [1 if backward_first else 0]
                wanted = [] if busy else wanted
            for d in wanted:
                sent[c, d] += 1
                under_way.append((now + lengths[d][c], d, c, queues[c, d].pop(0)))
        for n in range(S):
            if any(i[1:3] == ("block", n) for i in under_way):
                continue
            i = sum(code < 0 for code in orders[n])
            j = len(orders[n]) - i
            can_backward, can_forward = i in has_backward[n], j in has_forward[n]
            if can_backward and (not can_forward or i + 4 * (S - 1) - 2 * n <= j + 2 * n):
                orders[n].append(-1 - i)
                under_way.append((now + backward[n], "block", n, -1 - i))
            elif can_forward:
                orders[n].append(j)
                under_way.append((now + forward[n], "block", n, j))
        if not under_way:
            return orders
        now = max(now, min(item[0] for item in under_way))


@cache
def stage_orders(num_microbatches: int) -> list[list[int]]:
    """All orders of a stage's blocks in which each backward follows its forward."""
    orders = []
    for places in itertools.combinations(range(2 * num_microbatches), num_microbatches):
        order, forwards, backwards = [], 0, 0
        for position in range(2 * num_microbatches):
            if position in places:
                order.append(forwards)
                forwards += 1
            else:
                order.append(-1 - backwards)
                backwards += 1
            if backwards > forwards:
                break
        else:
            orders.append(order)
    return orders
