"""Stacks of convolutions and poolings over images, and branches that join."""

from dataclasses import dataclass

from pipeplan.zoo.operations import Operation, convolution, elementwise, norm, pool

__all__ = ["Conv", "Image", "Pool", "Stack", "concatenate", "stack"]


@dataclass(frozen=True, slots=True)
class Image:
    """The shape of one sample between two layers."""

    channels: int
    height: int
    width: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return self.channels * self.height * self.width


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution, then batch norm (or a bias) and ReLU.

    Padding keeps the size of the image at stride 1. With `valid` there is no padding.
    """

    channels: int
    kernel: int | tuple[int, int]
    stride: int = 1
    valid: bool = False
    batch_norm: bool = True
    relu: bool = True


@dataclass(frozen=True, slots=True)
class Pool:
    """A pooling, padded like `Conv`."""

    kernel: int
    stride: int
    valid: bool = True
    maximum: bool = True


@dataclass(frozen=True, slots=True)
class Stack:
    """The operations of a chain of steps, and the image that comes out."""

    image: Image
    operations: tuple[Operation, ...]


def stack(image: Image, *steps: Conv | Pool, keeps_input: bool = True) -> Stack:
    """The steps one after another; with `keeps_input=False` another branch keeps `image`."""
    operations: list[Operation] = []
    for index, step in enumerate(steps):
        kept = keeps_input or index > 0
        done = _conv(image, step, kept) if isinstance(step, Conv) else _pool(image, step, kept)
        operations += done.operations
        image = done.image
    return Stack(image, tuple(operations))


def concatenate(*branches: Stack) -> Stack:
    """The branches side by side, their outputs copied into one image."""
    channels = sum(branch.image.channels for branch in branches)
    image = Image(channels, branches[0].image.height, branches[0].image.width)
    copied = elementwise(image.elements, image.elements)
    return Stack(image, (*(op for branch in branches for op in branch.operations), copied))


def _conv(image: Image, step: Conv, keeps_input: bool) -> Stack:
    kernel = step.kernel if isinstance(step.kernel, tuple) else (step.kernel, step.kernel)
    after = Image(
        step.channels,
        _size_after(image.height, kernel[0], step.stride, step.valid),
        _size_after(image.width, kernel[1], step.stride, step.valid),
    )
    operations = [
        convolution(
            input_elements=image.elements,
            output_elements=after.elements,
            input_channels=image.channels,
            output_channels=step.channels,
            kernel=kernel,
            bias=not step.batch_norm,
            keeps_input=keeps_input,
        )
    ]
    if step.batch_norm:
        operations.append(norm(after.elements, parameters=2 * step.channels))
    if step.relu:
        # In place: the next step keeps the output as its input.
        operations.append(elementwise(after.elements, after.elements))
    return Stack(after, tuple(operations))


def _pool(image: Image, step: Pool, keeps_input: bool) -> Stack:
    after = Image(
        image.channels,
        _size_after(image.height, step.kernel, step.stride, step.valid),
        _size_after(image.width, step.kernel, step.stride, step.valid),
    )
    operation = pool(image.elements, after.elements, maximum=step.maximum, keeps_input=keeps_input)
    return Stack(after, (operation,))


def _size_after(size: int, kernel: int, stride: int, valid: bool) -> int:
    padding = 0 if valid else kernel // 2
    return (size + 2 * padding - kernel) // stride + 1
