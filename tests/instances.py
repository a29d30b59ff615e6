"""Random models, clusters and schedules: small, awkward, reproducible from a seed."""

import copy
import random
from dataclasses import replace

from pipeplan.cluster import Cluster, Device, Duplex
from pipeplan.cost import CostModel
from pipeplan.pipeline import Block, Kind, Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import SCHEDULES


def random_model(rng: random.Random, num_layers: int) -> ModelProfile:
    """Layers with zeros and whole numbers among their costs, so that ties are common."""

    def cost(scale: float) -> float:
        # Rounded, because a number is 0 or not below the format's limits.
        return rng.choice([0.0, float(rng.randint(1, 3)), round(rng.uniform(0, 3), 6)]) * scale

    return ModelProfile(
        name="random",
        microbatch_size=rng.randint(1, 8),
        input_bytes=cost(1e6),
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_ms=cost(1),
                backward_ms=cost(2),
                output_bytes=cost(1e6),
                gradient_bytes=cost(1e6),
                parameter_bytes=cost(1e6),
                activation_bytes=cost(1e6),
            )
            for index in range(num_layers)
        ),
    )


def random_cluster(rng: random.Random, num_devices: int, *, gaps: bool = False) -> Cluster:
    """Asymmetric links, latencies, speeds; with `gaps` some pairs have no path."""

    def bandwidth() -> float:
        if gaps and rng.random() < 0.15:
            return 0.0
        return rng.choice([1.0, 2.0, rng.uniform(0.2, 10)])

    def matrix(entry) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(entry() for _ in range(num_devices)) for _ in range(num_devices))

    latency = rng.choice([0.0, 100.0, matrix(lambda: round(rng.uniform(0, 500), 3))])
    return Cluster(
        name="random",
        devices=tuple(
            Device(name=f"d{index}", speed=rng.choice([1.0, 1.0, 2.0, rng.uniform(0.5, 3)]))
            for index in range(num_devices)
        ),
        bandwidth_gb_per_s=matrix(bandwidth),
        latency_us=latency,
        duplex=rng.choice(list(Duplex)),
    )


def random_stages(
    rng: random.Random, num_layers: int, num_devices: int, *, shares: bool = False
) -> tuple[Stage, ...]:
    """Stages over arbitrary device sets."""
    num_stages = rng.randint(1, min(num_layers, num_devices))
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    devices = rng.sample(range(num_devices), rng.randint(num_stages, num_devices))
    ends = [*sorted(rng.sample(range(1, len(devices)), num_stages - 1)), len(devices)]
    stages = []
    first = 0
    for index, end in enumerate(ends):
        mine = tuple(devices[first:end])
        first = end
        weights = [rng.uniform(0.5, 2) for _ in mine]
        uneven = shares and rng.random() < 0.5
        stages.append(
            Stage(
                layers=range(cuts[index], cuts[index + 1]),
                devices=mine,
                shares=tuple(w / sum(weights) for w in weights) if uneven else None,
                recompute=shares and rng.random() < 0.3,
            )
        )
    return tuple(stages)


def random_schedule(rng: random.Random, num_stages: int, num_microbatches: int) -> Schedule:
    """An order that cannot deadlock: blocks in a random order of a causal execution.

    Microbatches go through the stages in one random order forwards and another backwards, but
    each stage mixes its forwards and backwards in its own way.
    """
    position = {}  # of the next block of each microbatch: stages forward, then backward
    orders: list[list[Block]] = [[] for _ in range(num_stages)]
    open_microbatches = list(range(num_microbatches))
    while open_microbatches:
        microbatch = rng.choice(open_microbatches[: rng.randint(1, len(open_microbatches))])
        step = position.get(microbatch, 0)
        if step < num_stages:
            orders[step].append(Block(Kind.FORWARD, step, microbatch))
        else:
            stage = 2 * num_stages - 1 - step
            orders[stage].append(Block(Kind.BACKWARD, stage, microbatch))
        position[microbatch] = step + 1
        if step + 1 == 2 * num_stages:
            open_microbatches.remove(microbatch)
    return Schedule(tuple(tuple(order) for order in orders))


def random_costs(rng: random.Random, *, shares: bool = False):
    """Costs of a random pipeline."""
    num_layers, num_devices = rng.randint(1, 7), rng.randint(1, 7)
    model = random_model(rng, num_layers)
    cluster = random_cluster(rng, num_devices)
    stages = random_stages(rng, num_layers, num_devices, shares=shares)
    return CostModel(model, cluster).pipeline_costs(stages)


def random_plan(
    rng: random.Random,
    *,
    max_layers: int = 7,
    num_devices: int | None = None,
    max_microbatches: int = 6,
) -> Plan:
    """A valid plan of any kind, without figures.

    Shares even, uneven and of whole samples; recomputation; any order that does not deadlock.
    """
    num_layers, num_devices = rng.randint(1, max_layers), num_devices or rng.randint(1, 7)
    model, cluster = random_model(rng, num_layers), random_cluster(rng, num_devices)
    stages = random_stages(rng, num_layers, num_devices, shares=True)
    if rng.random() < 0.3:
        stages = tuple(whole_samples(stage, model.microbatch_size) for stage in stages)
    microbatches = rng.randint(1, max_microbatches)
    rule = rng.choice([None, *SCHEDULES])
    if rule is None:
        schedule = random_schedule(rng, len(stages), microbatches)
    else:
        costs = CostModel(model, cluster).pipeline_costs(stages)
        schedule = Schedule.from_codes(SCHEDULES[rule](costs, microbatches).order_SM2)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        planner="random",
    )


def whole_samples(stage: Stage, microbatch_size: int) -> Stage:
    """The stage with the most even shares of whole samples, if there are enough samples."""
    fewer, with_one_more = divmod(microbatch_size, stage.num_replicas)
    if not fewer:
        return stage
    samples = [fewer + (index < with_one_more) for index in range(stage.num_replicas)]
    return replace(stage, shares=tuple(count / microbatch_size for count in samples))


def forced(made, **changes):
    """A copy with other fields, past all checks of the constructor."""
    changed = copy.copy(made)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def even_model(num_layers: int, forward_ms: float, backward_ms: float) -> ModelProfile:
    """Equal layers that send nothing."""
    return ModelProfile(
        name="even",
        microbatch_size=1,
        layers=tuple(
            LayerProfile(
                name=str(index),
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                output_bytes=0,
                parameter_bytes=0,
            )
            for index in range(num_layers)
        ),
    )


def model_of(*layers: tuple[float, float, float]) -> ModelProfile:
    """Layers of (forward_ms, which is backward_ms too, output_bytes, parameter_bytes)."""
    return ModelProfile(
        name="m",
        microbatch_size=64,
        layers=tuple(
            LayerProfile(
                name=str(index),
                forward_ms=work_ms,
                backward_ms=work_ms,
                output_bytes=output_bytes,
                parameter_bytes=parameter_bytes,
            )
            for index, (work_ms, output_bytes, parameter_bytes) in enumerate(layers)
        ),
    )


def even_plan(num_stages: int, num_microbatches: int, num_devices: int = 0) -> Plan:
    """Equal stages of one layer and one device each, under 1F1B, without figures."""
    model = even_model(num_stages, 1.0, 2.0)
    cluster = flat_cluster(max(num_devices, num_stages))
    stages = tuple(Stage(layers=range(n, n + 1), devices=(n,)) for n in range(num_stages))
    run = SCHEDULES["1f1b"](CostModel(model, cluster).pipeline_costs(stages), num_microbatches)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=num_microbatches,
        stages=stages,
        schedule=Schedule.from_codes(run.order_SM2),
        planner="1f1b",
    )


def flat_cluster(num_devices: int, bandwidth_gb_per_s: float = 1.0, **fields) -> Cluster:
    """Equal devices with equal links."""
    row = (bandwidth_gb_per_s,) * num_devices
    return Cluster(
        name="flat",
        devices=tuple(Device(name=f"d{index}") for index in range(num_devices)),
        bandwidth_gb_per_s=(row,) * num_devices,
        **fields,
    )


HOSTILE_NAMES = (
    "<b>bold</b>",
    "</script><script>alert(1)</script>",
    "</title></style><svg onload=alert(1)>",
    "\"><img src=x onerror='alert(1)'>",
    "' onx='alert(1)",
    "]]><!--",
    "&lt;b&gt;&amp;&#60;",
    "{{plan}}{% for x in y %}${x}",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b2J\x00\x08\x7f",
    "\u202eevil\u2066\u200f",
    "\u2028line\u2029paragraph\x85next",
    "two\nlines\r\nand\ttabs",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-2",
    "@SUM(A1)",
    "$(reboot)`reboot`; rm -rf ~ | cat && echo",
    "../../etc/passwd",
    "C:\\con\\nul",
    "a` - at `$.b",
    "layers[0].name: is missing",
    "F0",
    "null",
    "NaN",
    "1e9",
    "😀" * 20,
    "e\u0301\ufeff\u200d",
    " ",
    "",
    "x" * 10_000,
    "<" * 5_000 + "\n" * 5_000,
)


def hostile_names(rng: random.Random, number: int = 1) -> list[str]:
    """Different names that attack pages, terminals, shells, spreadsheets, readers and layouts."""
    names = [f"{rng.choice(HOSTILE_NAMES)}{index or ''}" for index in range(number)]
    rng.shuffle(names)
    return names


def hostile_plan(rng: random.Random, num_microbatches: int = 2) -> Plan:
    """A valid plan without predicted figures, in which every name is hostile."""
    num_layers, num_devices = rng.randint(1, 4), rng.randint(1, 4)
    model, cluster = random_model(rng, num_layers), random_cluster(rng, num_devices)
    layers = zip(model.layers, hostile_names(rng, num_layers), strict=True)
    hosts = hostile_names(rng, num_devices)
    devices = zip(cluster.devices, hostile_names(rng, num_devices), hosts, strict=True)
    stages = random_stages(rng, num_layers, num_devices, shares=True)
    return Plan(
        model=replace(
            model,
            name=rng.choice(HOSTILE_NAMES),
            layers=tuple(replace(layer, name=name) for layer, name in layers),
        ),
        cluster=replace(
            cluster,
            name=rng.choice(HOSTILE_NAMES),
            devices=tuple(
                replace(device, name=name, host=host, memory_gb=rng.choice([None, 1e-6, 16.0]))
                for device, name, host in devices
            ),
        ),
        microbatches=num_microbatches,
        stages=stages,
        schedule=random_schedule(rng, len(stages), num_microbatches),
        planner=rng.choice(HOSTILE_NAMES),
        options={name: name for name in hostile_names(rng, 2)},
        seed=rng.randrange(2**64),
        version=rng.choice(HOSTILE_NAMES),
    )
