"""Ready inputs by name: models computed from their shapes, and clusters.

>>> from pipeplan import zoo
>>> model, cluster = zoo.model("bert-large"), zoo.cluster("4x2-10g")

Nothing here is measured. A model's times are computed from FLOPs and bytes by the roofline of
`zoo.hardware`. Its parameters and FLOPs match the published totals.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeplan.zoo.catalogue import (
        ClusterFigures,
        ModelFigures,
        cluster,
        cluster_figures,
        model,
        model_figures,
    )

__all__ = [
    "CLUSTER_NAMES",
    "MODEL_NAMES",
    "ClusterFigures",
    "ModelFigures",
    "cluster",
    "cluster_figures",
    "model",
    "model_figures",
]

MODEL_NAMES: tuple[str, ...] = (
    "vgg19",
    "resnet152",
    "inception-v3",
    "transformer-big",
    "bert-large",
    "bert-48",
    "xlnet-large",
    "gpt2-xl",
    "llama-7b",
    "llama-70b",
    "mixtral-8x7b",
    "llava-7b",
)
"""The models that `model` knows."""

CLUSTER_NAMES: tuple[str, ...] = (
    "1x8-nvlink",
    "1x8-pcie",
    "4x2-10g",
    "4x2-25g",
    "4x2-100g",
    "2x8-100g",
    "8x8-100g",
    "mixed-hosts",
    "random-8",
    "4x2-10g-no-shared-card",
    "4x2-25g-no-shared-card",
    "4x2-100g-no-shared-card",
    "2x8-100g-no-shared-card",
    "8x8-100g-no-shared-card",
    "mixed-hosts-no-shared-card",
)
"""The clusters that `cluster` knows."""


def __getattr__(name: str) -> Any:
    # The descriptions load on first use, because that takes 15 ms. The command line needs only the
    # names for its help.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeplan.zoo import catalogue

    return getattr(catalogue, name)
