"""Random plans on clusters with shared links, small and of every kind."""

import random

from pipeplan.cluster import Cluster, Device, Duplex, HostGroup, expand_hosts
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.shared_links import SharedLink
from pipeplan.simulator import Preference, run_list


def random_cluster(rng: random.Random) -> Cluster:
    num_devices = rng.randint(2, 9)
    hosts = [f"h{rng.randrange(max(1, num_devices // 2))}" for _ in range(num_devices)]
    if rng.random() < 0.5:
        hosts.sort()
    devices = tuple(
        Device(name=f"d{i}", host=host, speed=rng.choice([1, 1, 2, 0.5]))
        for i, host in enumerate(hosts)
    )
    everyone = range(num_devices)
    rates = [
        [rng.choice([1.0, 2.0, 4.0, 10 ** rng.uniform(-1, 1)]) for _ in everyone] for _ in everyone
    ]
    waits = [[rng.choice([0.0, 5.0, 100.0]) for _ in everyone] for _ in everyone]
    named = {host: rng.choice([0.5, 1.0, 3.0]) for host in sorted(set(hosts)) if rng.random() < 0.7}
    uplinks = rng.choice([None, 1.0, 2.0, named or None])
    shared: list[SharedLink] = []
    for i in range(rng.randint(0 if uplinks else 1, 3)):
        # A set of any devices, or one inside the set before it.
        around = shared[-1].members if shared and rng.random() < 0.4 else None
        names = around or tuple(device.name for device in devices)
        shared.append(
            SharedLink(
                name=f"s{i}",
                members=tuple(rng.sample(names, rng.randint(1, len(names)))),
                gb_per_s=rng.choice([0.5, 1.0, 2.0, 5.0]),
                in_gb_per_s=rng.choice([None, 0.7, 3.0]),
            )
        )
    return Cluster(
        name="random",
        devices=devices,
        bandwidth_gb_per_s=tuple(map(tuple, rates)),
        latency_us=rng.choice([0.0, 50.0, tuple(map(tuple, waits))]),
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s=uplinks,
        shared=tuple(shared),
    )


def random_model(rng: random.Random) -> ModelProfile:
    def some_bytes() -> float:
        return rng.choice([0.0, 1e6, 2e6, 5e6, float(rng.randint(1, 10**7))])

    def some_ms() -> float:
        return rng.choice([0.0, 1.0, 2.0, rng.uniform(0.1, 5)])

    return ModelProfile(
        name="random",
        microbatch_size=8,
        layers=tuple(
            LayerProfile(
                name=str(i),
                forward_ms=some_ms(),
                backward_ms=some_ms(),
                output_bytes=some_bytes(),
                gradient_bytes=some_bytes(),
                parameter_bytes=some_bytes(),
            )
            for i in range(rng.randint(1, 8))
        ),
    )


def random_stages(rng: random.Random, model: ModelProfile, cluster: Cluster) -> tuple[Stage, ...]:
    num_layers, num_devices = len(model.layers), cluster.num_devices
    num_stages = rng.randint(1, min(num_layers, num_devices))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    order = rng.sample(range(num_devices), num_devices)
    used = rng.randint(num_stages, num_devices)
    sets = [0, *sorted(rng.sample(range(1, used), num_stages - 1)), used]
    stages = []
    for n in range(num_stages):
        devices = tuple(order[sets[n] : sets[n + 1]])
        parts = [rng.randint(1, 4) for _ in devices]
        shares = tuple(part / sum(parts) for part in parts) if rng.random() < 0.4 else None
        stages.append(
            Stage(
                layers=range(cuts[n], cuts[n + 1]),
                devices=devices,
                shares=shares,
                recompute=rng.random() < 0.2,
            )
        )
    return tuple(stages)


def equal_hosts(rng: random.Random) -> Cluster:
    """Hosts that are alike, maybe in racks that are alike; sometimes one of them is not."""
    num_hosts, on_host = rng.choice([2, 3, 4, 4, 6, 9]), rng.choice([2, 3, 4])
    uplinks: float | dict[str, float] = rng.choice([0.5, 1.0, 2.0])
    if rng.random() < 0.2:
        uplinks = {f"h{h}": rng.choice([1.0, 1.0, 3.0]) for h in range(rng.randint(1, num_hosts))}
    size = rng.choice([1, num_hosts // 2])
    racks = [
        SharedLink(
            name=f"rack{first}",
            members=tuple(f"h{h}" for h in range(first, min(first + size, num_hosts))),
            gb_per_s=rng.choice([0.7, 1.5]) if first else 1.5,
            in_gb_per_s=1.0,
        )
        for first in range(0, num_hosts, size)
    ]
    return expand_hosts(
        "equal hosts",
        [HostGroup(count=num_hosts, devices=on_host, bandwidth_gb_per_s=rng.choice([5.0, 20.0]))],
        between_hosts_gb_per_s=rng.choice([0.5, 1.0, 2.0]),
        latency_us=rng.choice([0.0, 10.0]),
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s=uplinks,
        shared=tuple(racks) if rng.random() < 0.4 else (),
    )


def even_stages(rng: random.Random, model: ModelProfile, cluster: Cluster) -> tuple[Stage, ...]:
    """Stages over many hosts, most of them evenly."""
    hosts: dict[str, list[int]] = {}
    for device, each in enumerate(cluster.devices):
        hosts.setdefault(each.host, []).append(device)
    num_stages = rng.randint(1, min(len(model.layers), len(hosts["h0"])))
    cuts = [0, *sorted(rng.sample(range(1, len(model.layers)), num_stages - 1)), len(model.layers)]
    stages = []
    for n in range(num_stages):
        devices = [of_host[n] for of_host in hosts.values()]
        if rng.random() < 0.4:  # then flows that are alike use one side more often than another
            devices = rng.sample(devices, rng.randint(1, len(devices)))
        stages.append(Stage(layers=range(cuts[n], cuts[n + 1]), devices=tuple(devices)))
    return tuple(stages)


def symmetric_plan(seed: int) -> Plan:
    """A plan with many flows that are alike, or nearly."""
    rng = random.Random(seed)
    cluster, model = equal_hosts(rng), random_model(rng)
    return _plan_of(rng, model, cluster, even_stages(rng, model, cluster))


def half_symmetric_plan(seed: int) -> Plan:
    """Many hosts of a few kinds, and any stages: kinds of flows use one side more than another."""
    rng = random.Random(seed)
    num_hosts = rng.randint(8, 36)
    cluster = expand_hosts(
        "kinds of hosts",
        [HostGroup(count=num_hosts, devices=2, bandwidth_gb_per_s=5.0)],
        between_hosts_gb_per_s=2.0,
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s={f"h{h}": rng.choice([0.5, 1.0, 2.0]) for h in range(num_hosts)},
    )
    model = random_model(rng)
    num_stages = rng.randint(1, min(4, len(model.layers)))
    cuts = [0, *sorted(rng.sample(range(1, len(model.layers)), num_stages - 1)), len(model.layers)]
    left = rng.sample(range(2 * num_hosts), 2 * num_hosts)
    stages = []
    for n in range(num_stages):
        devices = [left.pop() for _ in range(rng.randint(1, min(9, num_hosts // 2)))]
        stages.append(Stage(layers=range(cuts[n], cuts[n + 1]), devices=tuple(devices)))
    return _plan_of(rng, model, cluster, tuple(stages))


def random_plan(seed: int, preference: Preference | None = None) -> Plan:
    rng = random.Random(seed)
    cluster, model = random_cluster(rng), random_model(rng)
    return _plan_of(rng, model, cluster, random_stages(rng, model, cluster), preference)


def extreme_plan(seed: int) -> Plan:
    """Numbers that differ by twelve orders of magnitude, on sets inside of sets."""
    rng = random.Random(seed)
    cluster, model = _extreme_cluster(rng), _extreme_model(rng)
    return _plan_of(rng, model, cluster, random_stages(rng, model, cluster))


def _extreme_cluster(rng: random.Random) -> Cluster:
    def some_gb_per_s() -> float:
        return rng.choice([1.0, *(10 ** rng.uniform(-digits, digits) for digits in (1, 3, 6))])

    def some_us() -> float:
        return rng.choice([0.0, 10 ** rng.uniform(-3, 4)])

    everyone = range(rng.randint(2, 12))
    num_hosts = max(1, len(everyone) // rng.choice([1, 2, 3]))
    devices = tuple(Device(name=f"d{i}", host=f"h{rng.randrange(num_hosts)}") for i in everyone)
    shared: list[SharedLink] = []
    around = names = tuple(device.name for device in devices)
    for i in range(rng.randint(1, 5)):
        members = tuple(rng.sample(around, rng.randint(1, len(around))))
        around = members if rng.random() < 0.6 else names
        rates = some_gb_per_s(), rng.choice([None, some_gb_per_s()])
        shared.append(
            SharedLink(name=f"s{i}", members=members, gb_per_s=rates[0], in_gb_per_s=rates[1])
        )
    hosts = sorted({device.host for device in devices})
    return Cluster(
        name="extreme",
        devices=devices,
        bandwidth_gb_per_s=tuple(tuple(some_gb_per_s() for _ in everyone) for _ in everyone),
        latency_us=rng.choice([0.0, tuple(tuple(some_us() for _ in everyone) for _ in everyone)]),
        duplex=rng.choice(list(Duplex)),
        uplink_gb_per_s=rng.choice([None, {host: some_gb_per_s() for host in hosts}]),
        shared=tuple(shared),
    )


def _extreme_model(rng: random.Random) -> ModelProfile:
    def some_bytes() -> float:
        return rng.choice([0.0, 1.0, 10 ** rng.uniform(0, 12)])

    def some_ms() -> float:
        return rng.choice([0.0, 1.0, 10 ** rng.uniform(-6, 6)])

    layers = [
        LayerProfile(
            name=str(i),
            forward_ms=some_ms(),
            backward_ms=some_ms(),
            output_bytes=some_bytes(),
            gradient_bytes=some_bytes(),
            parameter_bytes=some_bytes(),
        )
        for i in range(rng.randint(1, 9))
    ]
    return ModelProfile(name="extreme", microbatch_size=8, layers=tuple(layers))


def _plan_of(
    rng: random.Random,
    model: ModelProfile,
    cluster: Cluster,
    stages: tuple[Stage, ...],
    preference: Preference | None = None,
) -> Plan:
    microbatches = rng.randint(1, 12)
    costs = CostModel(model, cluster).pipeline_costs(stages)
    caps = [rng.randint(1, microbatches) for _ in stages]
    chosen = preference or rng.choice(list(Preference))
    run = run_list(costs, microbatches, chosen, caps)
    return Plan(
        planner="test",
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=Schedule.from_codes(run.order_SM2),
    )
