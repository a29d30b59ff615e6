"""Small models, and random plans for them."""

import random

import torch
from torch import nn

from instances import flat_cluster
from pipeplan.cost import CostModel
from pipeplan.pipeline import Plan, Schedule, Stage
from pipeplan.profile import LayerProfile, ModelProfile
from pipeplan.schedules import SCHEDULES

WIDTH = 12


class Block(nn.Module):
    """A transformer's block, without dropout."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.feed(x)


class TinyLanguageModel(nn.Module):
    """Embedding, blocks, head; the head may share the embedding's weights."""

    def __init__(self, num_blocks=3, vocabulary=17, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_mlp(depth=5):
    layers = []
    for _ in range(depth - 1):
        layers.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def mlp_loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def token_loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def make_case(kind):
    """A model, its layer names, its loss and a function that makes batches."""
    torch.manual_seed(5)
    if kind == "mlp":
        model = make_mlp()
        names = [name for name, _ in model.named_children()]

        def batch(generator, rows):
            return (
                torch.randn(rows, WIDTH, generator=generator),
                torch.randn(rows, 4, generator=generator),
            )

        return model, names, mlp_loss, batch
    model = TinyLanguageModel(tied=kind == "tied")
    names = ["before", *(f"blocks.{i}" for i in range(3)), "behind"]

    def token_batch(generator, rows):
        tokens = torch.randint(17, (rows, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return model, names, token_loss, token_batch


def cut_plan(names, cuts, replicas, microbatches, rows, num_devices=None, **options):
    """A plan with stages that begin at these layers, on devices in order."""
    ends = [*cuts[1:], len(names)]
    first = 0
    stages = []
    recompute = options.pop("recompute", False)
    for start, end, count in zip(cuts, ends, replicas, strict=True):
        devices = tuple(range(first, first + count))
        stages.append(Stage(layers=range(start, end), devices=devices, recompute=recompute))
        first += count
    return make_plan(names, stages, microbatches, rows, num_devices=num_devices, **options)


def make_plan(names, stages, microbatches, rows, schedule="1f1b", num_devices=None):
    """A plan for layers of these names; times are of no matter here."""
    profile = ModelProfile(
        name="sample",
        microbatch_size=rows,
        layers=tuple(
            LayerProfile(
                name=name,
                forward_ms=1 + i % 3,
                backward_ms=2,
                output_bytes=1e5,
                parameter_bytes=1e5,
            )
            for i, name in enumerate(names)
        ),
    )
    num_devices = num_devices or sum(stage.num_replicas for stage in stages)
    cluster = flat_cluster(num_devices, 1.0)
    run = SCHEDULES[schedule](CostModel(profile, cluster).pipeline_costs(stages), microbatches)
    return Plan(
        model=profile,
        cluster=cluster,
        microbatches=microbatches,
        stages=tuple(stages),
        schedule=Schedule.from_codes(run.order_SM2.tolist()),
        planner="test",
    )


def random_plan(rng: random.Random, names, num_devices):
    """Any cuts, replicas of 1-3, shares even or not, any schedule, odd sizes."""
    num_stages = rng.randint(1, min(4, num_devices, len(names)))
    replicas = [num_devices] * num_stages
    while sum(replicas) > num_devices or max(replicas) > 3:
        replicas = [rng.randint(1, 3) for _ in range(num_stages)]
    cuts = [0, *sorted(rng.sample(range(1, len(names)), num_stages - 1)), len(names)]
    devices = rng.sample(range(num_devices), sum(replicas))  # the others' ranks stay idle
    stages = []
    for index, count in enumerate(replicas):
        mine, devices = tuple(devices[:count]), devices[count:]
        weights = [rng.uniform(0.5, 2) for _ in mine]
        uneven = rng.random() < 0.5
        stages.append(
            Stage(
                layers=range(cuts[index], cuts[index + 1]),
                devices=mine,
                shares=tuple(w / sum(weights) for w in weights) if uneven else None,
                recompute=rng.random() < 0.2,
            )
        )
    rows = rng.randint(max(replicas), 6)
    microbatches = rng.randint(1, 5)
    return make_plan(
        names,
        stages,
        microbatches,
        rows,
        rng.choice(list(SCHEDULES)),
        num_devices=num_devices,
    )
