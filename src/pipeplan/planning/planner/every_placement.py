"""Every way to place a model on a cluster: for tiny instances, and as an oracle for tests."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from pipeplan.cost import CostModel
from pipeplan.errors import PlanFileError
from pipeplan.pipeline import Stage

__all__ = ["all_placements", "whole_sample_variants"]


def all_placements(cost: CostModel) -> Iterator[tuple[Stage, ...]]:
    """Every way to cut the layers into stages and to give each a set of connected devices.

    No set is larger than `cost.max_replicas`.
    """
    num_layers, num_devices = len(cost.forward_ms_L), len(cost.speed_D)
    for num_stages in range(1, min(num_layers, num_devices) + 1):
        for stage_of in itertools.product(range(-1, num_stages), repeat=num_devices):
            sets = [
                tuple(device for device, stage in enumerate(stage_of) if stage == n)
                for n in range(num_stages)
            ]
            if not all(sets) or max(map(len, sets)) > cost.max_replicas:
                continue
            for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
                ends = (*cuts, num_layers)
                stages = tuple(
                    Stage(layers=range(first, end), devices=devices)
                    for first, end, devices in zip((0, *cuts), ends, sets, strict=True)
                )
                try:
                    cost.pipeline_costs(stages)
                except PlanFileError:
                    break  # the sets lack a path, for all cuts
                yield stages


def whole_sample_variants(
    cost: CostModel, stages: tuple[Stage, ...]
) -> Iterator[tuple[Stage, ...]]:
    """The stages with whole samples divided as evenly as can be, where that is not quite even.

    Where the devices do not divide the samples, some of them take one sample more; all choices of
    these are given. Such shares count as even.
    """
    samples = cost.model.microbatch_size
    choices = []
    for stage in stages:
        size, more = stage.num_replicas, samples % stage.num_replicas
        shares: list[tuple[float, ...] | None] = [None]
        if more and size <= samples:
            shares += [
                tuple((samples // size + (n in chosen)) / samples for n in range(size))
                for chosen in itertools.combinations(range(size), more)
            ]
        choices.append(shares)
    for chosen_shares in itertools.product(*choices):
        if not any(chosen_shares):
            continue
        yield tuple(
            stage if shares is None else replace(stage, shares=shares)
            for stage, shares in zip(stages, chosen_shares, strict=True)
        )
