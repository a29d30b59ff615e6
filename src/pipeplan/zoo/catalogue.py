"""Models and clusters of the zoo by name, and their key figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.profile import ModelProfile
from pipeplan.zoo import clusters, multimodal, transformers, vision
from pipeplan.zoo.architecture import Recipe
from pipeplan.zoo.hardware import ACCELERATORS, Accelerator, Precision
from pipeplan.zoo.profiles import profile_architecture

__all__ = [
    "ClusterFigures",
    "ModelFigures",
    "cluster",
    "cluster_figures",
    "model",
    "model_figures",
]

_MODELS: Mapping[str, Recipe] = MappingProxyType(
    {**vision.RECIPES, **transformers.RECIPES, **multimodal.RECIPES}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """The key figures of a model, for a listing."""

    name: str
    num_layers: int
    parameters: int
    """Tied embeddings count once; experts count all."""
    forward_flops: int
    """For one sample of the default sequence length; a multiply-add is 2 FLOPs."""
    microbatch_size: int
    sequence_length: int | None
    device: str
    precision: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFigures:
    """The key figures of a cluster, for a listing."""

    name: str
    num_hosts: int
    num_devices: int
    slowest_link_gb_per_s: float
    fastest_link_gb_per_s: float
    smallest_memory_gb: float | None
    """The least memory of a device; None if no device has a limit."""
    largest_memory_gb: float | None
    description: str


def model(
    name: str,
    *,
    device: str | None = None,
    microbatch_size: int | None = None,
    sequence_length: int | None = None,
    precision: str | None = None,
) -> ModelProfile:
    """The profile of a model of the zoo; arguments that are missing have the model's defaults.

    Args:
        name: One of `zoo.MODEL_NAMES`.
        device: The reference device: V100, A100 or H100.
        microbatch_size: Samples in one microbatch.
        sequence_length: Tokens in one sample, for models that have a sequence. transformer-big has
            this many in the source and again in the target. llava-7b includes the 576 of its image.
        precision: fp32, fp16 or bf16.

    Raises:
        InputError: A name or a value that the zoo does not know.
    """
    recipe = _MODELS[_known("model", name, tuple(_MODELS))]
    device = recipe.device if device is None else device
    precision = recipe.precision if precision is None else precision
    microbatch_size = recipe.microbatch_size if microbatch_size is None else microbatch_size
    accelerator = ACCELERATORS[_known("device", device, tuple(ACCELERATORS))]
    chosen_precision = _precision(precision, accelerator)
    _require_count("microbatch_size", microbatch_size, shortest=1)
    if sequence_length is not None:
        _require_sequence(name, recipe, sequence_length)
    return profile_architecture(
        recipe.architecture(sequence_length),
        name=_setting(
            name, recipe, accelerator.name, chosen_precision, microbatch_size, sequence_length
        ),
        accelerator=accelerator,
        precision=chosen_precision,
        microbatch_size=microbatch_size,
    )


def cluster(name: str, *, seed: int = 0) -> Cluster:
    """A cluster of the zoo; `seed` changes random clusters only.

    Raises:
        InputError: A name that the zoo does not know, or a seed that is no integer.
    """
    if not isinstance(seed, int):
        raise InputError(f"seed: {seed!r} is not an integer")
    return clusters.RECIPES[_known("cluster", name, tuple(clusters.RECIPES))].build(name, seed)


def model_figures(name: str) -> ModelFigures:
    """The key figures of the model at its defaults."""
    recipe = _MODELS[_known("model", name, tuple(_MODELS))]
    architecture = recipe.architecture()
    return ModelFigures(
        name=name,
        num_layers=len(architecture.layers),
        parameters=architecture.parameters,
        forward_flops=architecture.flops,
        microbatch_size=recipe.microbatch_size,
        sequence_length=recipe.sequence_length,
        device=recipe.device,
        precision=recipe.precision.value,
        source=recipe.source,
    )


def cluster_figures(name: str) -> ClusterFigures:
    """The key figures of the cluster; a random cluster has seed 0."""
    built = cluster(name)
    links = [
        gb_per_s
        for u, row in enumerate(built.bandwidth_gb_per_s)
        for v, gb_per_s in enumerate(row)
        if u != v
    ]
    limits = [device.memory_gb for device in built.devices if device.memory_gb is not None]
    return ClusterFigures(
        name=name,
        num_hosts=len({device.host for device in built.devices}),
        num_devices=built.num_devices,
        slowest_link_gb_per_s=min(links),
        fastest_link_gb_per_s=max(links),
        smallest_memory_gb=min(limits, default=None),
        largest_memory_gb=max(limits) if len(limits) == built.num_devices else None,
        description=clusters.RECIPES[name].description,
    )


def _known(kind: str, name: str, known: tuple[str, ...]) -> str:
    """`name` if it is known; otherwise an error with the nearest known name."""
    if name in known:
        return name
    by_folded = {choice.casefold(): choice for choice in known}
    nearest = get_close_matches(str(name)[:64].casefold(), by_folded, n=1, cutoff=0.0)
    hint = f"did you mean {by_folded[nearest[0]]!r}? " if nearest else ""
    raise InputError(f"{kind}: {name!r} is not known; {hint}known are {', '.join(known)}")


def _precision(precision: str, accelerator: Accelerator) -> Precision:
    chosen = Precision(_known("precision", precision, tuple(Precision)))
    if chosen not in accelerator.peak_tflops:
        raise InputError(
            f"precision: {accelerator.name} has no {chosen};"
            f" choose one of {', '.join(accelerator.peak_tflops)}"
        )
    return chosen


def _require_count(field: str, count: int, *, shortest: int, longest: int | None = None) -> None:
    # True is an int in Python, but not a count.
    whole = isinstance(count, int) and not isinstance(count, bool)
    if not whole or count < shortest or (longest is not None and count > longest):
        upper = "" if longest is None else f" and at most {longest}"
        raise InputError(f"{field}: {count!r} is not an integer of at least {shortest}{upper}")


def _require_sequence(name: str, recipe: Recipe, sequence_length: int) -> None:
    if recipe.sequence_length is None:
        having = (other for other, its in _MODELS.items() if its.sequence_length is not None)
        raise InputError(
            f"sequence_length: {sequence_length!r} does not apply to {name}, whose samples are"
            f" images of one size; leave it out, or choose one of {', '.join(having)}"
        )
    _require_count(
        "sequence_length",
        sequence_length,
        shortest=recipe.shortest_sequence,
        longest=recipe.longest_sequence,
    )


def _setting(
    name: str,
    recipe: Recipe,
    device: str,
    precision: Precision,
    microbatch_size: int,
    sequence_length: int | None,
) -> str:
    """The model's name, followed by all settings that differ from its defaults."""
    parts = [name]
    if device != recipe.device:
        parts.append(device)
    if precision is not recipe.precision:
        parts.append(precision)
    if microbatch_size != recipe.microbatch_size:
        parts.append(f"microbatch {microbatch_size}")
    if sequence_length not in (None, recipe.sequence_length):
        parts.append(f"sequence {sequence_length}")
    return ", ".join(parts)
