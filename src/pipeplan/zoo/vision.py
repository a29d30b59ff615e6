"""VGG-19, ResNet-152 and Inception-v3, as torchvision builds them.

References:
    VGG-19: Simonyan and Zisserman 2015, arXiv:1409.1556, table 1, column E.
    ResNet-152: He et al. 2016, arXiv:1512.03385, table 1; the stride sits on the 3x3 convolution
    ("v1.5"), as in torchvision.
    Inception-v3: Szegedy et al. 2016, arXiv:1512.00567, table 1. The auxiliary classifier is a part
    of the layer `mixed6e`, so none of its data crosses a cut.

If a network branches, a layer of the profile is a whole block, so that one tensor crosses every
cut.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeplan.zoo.architecture import LOSS_BYTES, Architecture, LayerShape, Recipe
from pipeplan.zoo.hardware import Precision
from pipeplan.zoo.images import Conv, Image, Pool, Stack, concatenate, stack
from pipeplan.zoo.operations import (
    Operation,
    cross_entropy,
    dropout,
    elementwise,
    linear,
    residual,
)

__all__ = ["RECIPES", "inception_v3", "resnet152", "vgg19"]

_CLASSES = 1000


def vgg19() -> Architecture:
    """Sixteen 3x3 convolutions in five groups, then three linear layers: each is a layer."""
    image = start = Image(3, 224, 224)
    layers = []
    for group, (repeats, channels) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))):
        steps: dict[str, Conv | Pool] = {
            f"conv{group + 1}_{i + 1}": Conv(channels, 3, batch_norm=False) for i in range(repeats)
        }
        steps[f"pool{group + 1}"] = Pool(2, 2)
        for name, step in steps.items():
            done = stack(image, step)
            image = done.image
            layers.append(_layer(name, done))
    width = 4096
    relu = elementwise(width, width)
    layers += [
        LayerShape(
            name="fc6",
            operations=(linear(1, image.elements, width), relu, dropout(width)),
            output_elements=width,
        ),
        LayerShape(
            name="fc7",
            operations=(linear(1, width, width), relu, dropout(width)),
            output_elements=width,
        ),
        _classifier("fc8", width),
    ]
    return Architecture(layers=tuple(layers), input_elements=start.elements)


def resnet152() -> Architecture:
    """A stem, then 3 + 8 + 36 + 3 bottleneck blocks: each block is a layer."""
    start = Image(3, 224, 224)
    done = stack(start, Conv(64, 7, stride=2), Pool(3, 2, valid=False))
    layers = [_layer("conv1", done)]
    for group, (blocks, width) in enumerate(((3, 64), (8, 128), (36, 256), (3, 512))):
        for block in range(blocks):
            stride = 2 if block == 0 and group > 0 else 1
            done = _bottleneck(done.image, width, stride)
            layers.append(_layer(f"conv{group + 2}_{block + 1}", done))
    layers.append(_classifier("fc", done.image.channels, pooled_from=done.image))
    return Architecture(layers=tuple(layers), input_elements=start.elements)


def inception_v3() -> Architecture:
    """A stem of single layers, then eleven inception blocks: each block is a layer."""
    image = start = Image(3, 299, 299)
    stem: dict[str, Conv | Pool] = {
        "conv1a": Conv(32, 3, stride=2, valid=True),
        "conv2a": Conv(32, 3, valid=True),
        "conv2b": Conv(64, 3),
        "pool1": Pool(3, 2),
        "conv3b": Conv(80, 1),
        "conv4a": Conv(192, 3, valid=True),
        "pool2": Pool(3, 2),
    }
    layers = []
    for name, step in stem.items():
        done = stack(image, step)
        image = done.image
        layers.append(_layer(name, done))
    blocks: dict[str, Callable[[Image], Stack]] = {
        "mixed5b": lambda image: _inception_5x5(image, pool_channels=32),
        "mixed5c": lambda image: _inception_5x5(image, pool_channels=64),
        "mixed5d": lambda image: _inception_5x5(image, pool_channels=64),
        "mixed6a": _reduction_3x3,
        "mixed6b": lambda image: _inception_7x7(image, channels=128),
        "mixed6c": lambda image: _inception_7x7(image, channels=160),
        "mixed6d": lambda image: _inception_7x7(image, channels=160),
        "mixed6e": lambda image: _inception_7x7(image, channels=192),
        "mixed7a": _reduction_7x7,
        "mixed7b": _inception_expanded,
        "mixed7c": _inception_expanded,
    }
    for name, block in blocks.items():
        done = block(image)
        image = done.image
        beside = _auxiliary_classifier(image) if name == "mixed6e" else ()
        layers.append(_layer(name, done, *beside))
    layers.append(_classifier("fc", image.channels, pooled_from=image, dropped=True))
    return Architecture(layers=tuple(layers), input_elements=start.elements)


def _bottleneck(image: Image, width: int, stride: int) -> Stack:
    """1x1 down, 3x3, 1x1 up to four times the width; the bypass is projected to fit."""
    bypass = Conv(4 * width, 1, stride=stride, relu=False)
    body = stack(
        image, Conv(width, 1), Conv(width, 3, stride=stride), Conv(4 * width, 1, relu=False)
    )
    joined = body.operations
    if stack(image, bypass).image != image:
        joined += stack(image, bypass, keeps_input=False).operations
    elements = body.image.elements
    relu = elementwise(elements, elements)
    return Stack(body.image, (*joined, residual(elements, dropped=False), relu))


def _branches(image: Image, *branches: tuple[Conv | Pool, ...]) -> Stack:
    """Branches over one input; the first branch keeps the input."""
    return concatenate(
        *(stack(image, *steps, keeps_input=i == 0) for i, steps in enumerate(branches))
    )


def _inception_5x5(image: Image, *, pool_channels: int) -> Stack:
    """Figure 5 of the paper, with one 5x5 kept."""
    return _branches(
        image,
        (Conv(64, 1),),
        (Conv(48, 1), Conv(64, 5)),
        (Conv(64, 1), Conv(96, 3), Conv(96, 3)),
        (_AVERAGE, Conv(pool_channels, 1)),
    )


def _reduction_3x3(image: Image) -> Stack:
    """Figure 10 of the paper: halves height and width."""
    return _branches(
        image,
        (Conv(384, 3, stride=2, valid=True),),
        (Conv(64, 1), Conv(96, 3), Conv(96, 3, stride=2, valid=True)),
        (Pool(3, 2),),
    )


def _inception_7x7(image: Image, *, channels: int) -> Stack:
    """Figure 6 of the paper: 7x7 factored into 1x7 and 7x1."""
    wide, tall = Conv(channels, (1, 7)), Conv(channels, (7, 1))
    return _branches(
        image,
        (Conv(192, 1),),
        (Conv(channels, 1), wide, Conv(192, (7, 1))),
        (Conv(channels, 1), tall, wide, tall, Conv(192, (1, 7))),
        (_AVERAGE, Conv(192, 1)),
    )


def _reduction_7x7(image: Image) -> Stack:
    """Halves height and width behind the 7x7 blocks."""
    return _branches(
        image,
        (Conv(192, 1), Conv(320, 3, stride=2, valid=True)),
        (
            Conv(192, 1),
            Conv(192, (1, 7)),
            Conv(192, (7, 1)),
            Conv(192, 3, stride=2, valid=True),
        ),
        (Pool(3, 2),),
    )


def _inception_expanded(image: Image) -> Stack:
    """Figure 7 of the paper: two branches end in a 1x3 and a 3x1 side by side."""

    def fork(*steps: Conv | Pool) -> Stack:
        trunk = stack(image, *steps, keeps_input=False)
        forked = _branches(trunk.image, (Conv(384, (1, 3)),), (Conv(384, (3, 1)),))
        return Stack(forked.image, trunk.operations + forked.operations)

    return concatenate(
        stack(image, Conv(320, 1)),
        fork(Conv(384, 1)),
        fork(Conv(448, 1), Conv(384, 3)),
        stack(image, _AVERAGE, Conv(192, 1), keeps_input=False),
    )


_AVERAGE = Pool(3, 1, valid=False, maximum=False)


def _auxiliary_classifier(image: Image) -> tuple[Operation, ...]:
    """The side classifier of training, with a loss of its own."""
    head = stack(
        image, Pool(5, 3, maximum=False), Conv(128, 1), Conv(768, 5, valid=True), keeps_input=False
    )
    return (*head.operations, linear(1, 768, _CLASSES), cross_entropy(1, _CLASSES))


def _layer(name: str, done: Stack, *beside: Operation) -> LayerShape:
    return LayerShape(
        name=name, operations=(*done.operations, *beside), output_elements=done.image.elements
    )


def _classifier(
    name: str, width: int, *, pooled_from: Image | None = None, dropped: bool = False
) -> LayerShape:
    """The last layer: average over the image if there is one, linear map, loss."""
    before: tuple[Operation, ...] = ()
    if pooled_from is not None:
        before += (elementwise(pooled_from.elements, width),)
    if dropped:
        before += (dropout(width),)
    return LayerShape(
        name=name,
        operations=(*before, linear(1, width, _CLASSES), cross_entropy(1, _CLASSES)),
        passed_bytes=LOSS_BYTES,
    )


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "vgg19": Recipe(
            describe=lambda _: vgg19(),
            source="Simonyan and Zisserman 2015, arXiv:1409.1556",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=32,
        ),
        "resnet152": Recipe(
            describe=lambda _: resnet152(),
            source="He et al. 2016, arXiv:1512.03385",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=16,
        ),
        "inception-v3": Recipe(
            describe=lambda _: inception_v3(),
            source="Szegedy et al. 2016, arXiv:1512.00567",
            device="V100",
            precision=Precision.FP32,
            microbatch_size=32,
        ),
    }
)
"""The vision models by name."""
