"""Small plans of the second version, drawn by hand."""

from dataclasses import replace
from typing import Any

import pipeplan as pp
from pipeplan.pipeline import Block, Kind, Schedule, Stage


def parse_block(text: str) -> Block:
    """`3F0` as a block."""
    letter = next(letter for letter in text if letter in "FBIW")
    stage, _, microbatch = text.partition(letter)
    return Block(Kind(letter), int(stage), int(microbatch))


def schedule_of(*orders: str) -> Schedule:
    """Orders as texts, blocks with their stages: `0F0 0B0`."""
    return Schedule([[parse_block(text) for text in order.split()] for order in orders])


def make_layer(name: str, **changes: Any) -> pp.LayerProfile:
    """A layer whose F and B take 1 ms."""
    given = {"forward_ms": 1.0, "backward_ms": 1.0, "output_bytes": 0.0, "parameter_bytes": 0.0}
    return pp.LayerProfile(name=name, **{**given, **changes})


def make_cluster(
    bandwidth: list[list[float]], latency: list[list[float]], **more: Any
) -> pp.Cluster:
    """Devices `d0`, `d1`, ... with these links."""
    return pp.Cluster(
        name="by hand",
        devices=tuple(pp.Device(name=f"d{n}") for n in range(len(bandwidth))),
        bandwidth_gb_per_s=tuple(map(tuple, bandwidth)),
        latency_us=tuple(map(tuple, latency)),
        **more,
    )


def format_example() -> pp.Plan:
    """The example of docs/formats.md: groups X = {0, 3} and Y = {1, 2}, 23 ms.

    Every transfer has 1 ms of latency; that from stage 0 to 1 carries another 3 ms of bytes.
    """
    model = pp.ModelProfile(
        name="four layers",
        microbatch_size=1,
        layers=(
            make_layer("a", output_bytes=3e6, gradient_bytes=0.0),
            make_layer("b"),
            make_layer("c"),
            make_layer("d"),
        ),
    )
    cluster = make_cluster([[0, 1], [1, 0]], [[0, 1000], [1000, 0]])
    return pp.Plan(
        model=model,
        cluster=cluster,
        microbatches=3,
        stages=tuple(
            Stage(layers=range(n, n + 1), devices=(device,))
            for n, device in enumerate((0, 1, 1, 0))
        ),
        schedule=schedule_of(
            "0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2",
            "1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2",
        ),
        planner="by hand",
    )


def bucket_example() -> pp.Plan:
    """One group of two devices with two stages; I and W; two buckets for the second stage."""
    made = format_example()
    layers = (
        make_layer("a", parameter_bytes=2e6, weight_grad_ms=0.25, activation_bytes=5e6),
        make_layer("b", parameter_bytes=4e6, weight_grad_ms=0.5, activation_bytes=3e6),
    )
    return replace(
        made,
        model=replace(made.model, microbatch_size=2, layers=layers),
        microbatches=2,
        stages=(
            Stage(layers=range(1), devices=(0, 1)),
            Stage(layers=range(1, 2), devices=(1, 0), gradient_buckets=2),
        ),
        schedule=schedule_of("0F0 1F0 1I0 0F1 1F1 1B1 1W0 0B0 0I1 0W1"),
        shard_optimizer=True,
    )
