"""Random plans that other programs can run: equal replicas, even shares, a transformer's names."""

import random
from dataclasses import replace

from instances import random_cluster, random_model, random_plan, random_schedule
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import SCHEDULES

STYLES = {
    "zoo": ("embed", "decoder.{}", "head"),
    "hugging face": ("model.embed_tokens", "model.layers.{}", "lm_head"),
    "gpt": ("transformer.wte", "transformer.h.{}", "lm_head"),
    "bert": ("bert.embeddings", "bert.encoder.layer.{}", "cls"),
    "profiler": ("Embedding_0", "LlamaDecoderLayer_{}", "Linear_0"),
}


def named_layers(model: ModelProfile, style: str) -> tuple[LayerProfile, ...]:
    """The layers of a model with at least three, called embedding, blocks and head."""
    first, block, last = STYLES[style]
    names = [first, *(block.format(n) for n in range(model.num_layers - 2)), last]
    return tuple(replace(layer, name=name) for layer, name in zip(model.layers, names, strict=True))


def grid_plan(
    rng: random.Random,
    *,
    rule: str | None = None,
    max_stages: int = 6,
    max_replicas: int = 3,
    max_microbatches: int = 9,
) -> Plan:
    """A feasible plan with equally many replicas in each stage; the order is `rule`'s or any."""
    num_stages = rng.randint(1, max_stages)
    num_replicas = rng.randint(1, max_replicas)
    num_layers = rng.randint(max(3, num_stages), num_stages + 8)
    model = random_model(rng, num_layers)
    model = replace(
        model,
        microbatch_size=num_replicas * rng.randint(1, 3),
        layers=named_layers(model, rng.choice(list(STYLES))),
    )
    num_devices = num_stages * num_replicas + rng.randint(0, 2)
    cluster = random_cluster(rng, num_devices)
    devices = rng.sample(range(num_devices), num_stages * num_replicas)
    cuts = [0, *sorted(rng.sample(range(1, num_layers), num_stages - 1)), num_layers]
    stages = tuple(
        Stage(
            layers=range(cuts[n], cuts[n + 1]),
            devices=tuple(devices[n * num_replicas : (n + 1) * num_replicas]),
        )
        for n in range(num_stages)
    )
    microbatches = rng.randint(1, max_microbatches)
    chosen = rule or rng.choice([None, None, *SCHEDULES])
    if chosen is None:
        schedule = random_schedule(rng, num_stages, microbatches)
    else:
        costs = CostModel(model, cluster).pipeline_costs(stages)
        schedule = Schedule.from_codes(SCHEDULES[chosen](costs, microbatches).order_SM2)
    return Plan(
        model=model,
        cluster=cluster,
        microbatches=microbatches,
        stages=stages,
        schedule=schedule,
        planner="random",
    )


def any_plan(rng: random.Random) -> Plan:
    """A valid plan of any kind, most of which no other program can run."""
    while True:
        plan = random_plan(rng, max_layers=9)
        if plan.model.num_layers >= 3:
            layers = named_layers(plan.model, rng.choice(list(STYLES)))
            return replace(plan, model=replace(plan.model, layers=layers))
