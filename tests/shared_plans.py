"""Random plans on clusters with shared links, small and of every kind."""

import random

from pipeplan.cluster import Cluster, Device, Duplex
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


def random_plan(seed: int, preference: Preference | None = None) -> Plan:
    rng = random.Random(seed)
    cluster, model = random_cluster(rng), random_model(rng)
    stages = random_stages(rng, model, cluster)
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
