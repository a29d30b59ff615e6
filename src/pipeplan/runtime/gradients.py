"""Sums gradients over all ranks that hold a parameter: replicas, and stages that share it.

Parameters are put into buckets in the reverse of their order of use. That is roughly the order in
which their gradients are computed. The all-reduce of a bucket starts inside the last backward, as
soon as the last gradient of the bucket is there. Buckets start in their order, so that all replicas
agree::

    last backward   |--------------------------|
    all-reduce          |bucket 0| |bucket 1|     |bucket 2|

A parameter that several stages hold (tied weights) is summed over all ranks that hold it, in
separate buckets. One all-reduce is enough for that: replicas need not be summed first.

A rank with several stages starts the buckets of each stage as its gradients are done, in the order
in which the plan ends them. A bucket that several of its stages add to waits for the last of them.
The second half of a split backward says which weights it will add to. So a bucket does not wait for
weights that the first half has done.

A re-entrant activation checkpoint runs backwards inside of a backward. Then the gradient of a
weight that is used twice arrives in several parts, and a full bucket need not be complete. Once
that is seen, all-reduces start after the last backward only. The first backward of all shows it.

Each bucket ends with one count for each parameter: on how many ranks it got a gradient. A parameter
that got none anywhere stays without a gradient, as in ordinary training. The optimizer skips it.
In front of the counts there is a sample of one parameter's values, another one in each step. Ranks
that hold a parameter hold the same values, unless somebody has changed them on some ranks only.
Behind the last counts the loss may ride (`gradient_notes`).

Reference:
    Li et al. 2020, "PyTorch Distributed", VLDB 13, section 3.2.3: buckets and their order.
    Differs: counts and sample are part of the bucket, instead of a separate all-reduce.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeplan.documents.text import printable
from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.gradient_notes import GradientNotes
from pipeplan.runtime.gradient_parts import Bucket, Reduction, make_buckets

__all__ = ["GradientReducer", "Reduction", "start_sum"]

BUCKET_BYTES = 25e6
MOST_VALUES = 1024
"""In the sample of a parameter's values."""
FROZEN = 4096.0
"""The count of a parameter that a rank has frozen; a power of 2, so that sums are exact."""
DRIFT = 1e-5
"""Ranks that hold a parameter update it by the same numbers; this is more than rounding."""


class GradientReducer:
    """Collects the gradients of a step and sums them over their groups."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter] | Mapping[str, nn.Parameter],
        reductions: Sequence[Reduction],
        bucket_bytes: float = BUCKET_BYTES,
        notes: GradientNotes | None = None,
    ) -> None:
        """`notes` ride behind the gradients of the last bucket, whose group is all ranks then."""
        named = parameters if isinstance(parameters, Mapping) else {}
        given: Any = list(named.values()) if named else parameters
        self.parameters: list[nn.Parameter] = list(given)
        self.name_of = {id(parameter): name for name, parameter in named.items()}
        """By id, what messages call parameters."""
        num_more = notes.num_elements if notes is not None else 0
        self._buckets = [
            bucket
            for reduction in reductions
            for bucket in make_buckets(
                reduction, bucket_bytes, num_more * (reduction is reductions[-1])
            )
        ]
        self._notes = notes
        if notes is not None and self._buckets:
            notes.take_place(self._buckets[-1].rest)
        self._is_last = self._comes_in_parts = self._is_paused = False
        self._num_started = self._num_sums = 0
        self._num_backwards: Counter[int] = Counter()
        """By stage, in this step."""
        self._has_seen_backward: set[int] = set()
        """Stages whose first backward of all is over."""
        self._ended: set[int] = set()
        """Stages whose gradients are done in this step."""
        self.starts_inside = True
        """Whether full buckets start inside the last backward, or all of them behind it."""
        self.start_sum = start_sum
        """Starts to sum a tensor over a group."""
        self.started_inside = 0
        """How many all-reduces the last step started inside its last backward."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(bucket, index)
            )
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def begin(self, *, keeps: bool = False) -> None:
        """Drop the gradients of the last step; or keep them, to add those of the next batch."""
        self._is_last = False
        self._num_backwards.clear()
        self._ended.clear()
        for bucket in self._buckets:
            bucket.num_backwards, bucket.is_final = 0, False
            bucket.num_missing = len(bucket.parameters)
            bucket.num_arrivals = [0] * len(bucket.parameters)
        if keeps:
            return
        for parameter in self.parameters:
            parameter.grad = None
        self._num_started = self.started_inside = 0
        for bucket in self._buckets:
            bucket.used.clear()

    def begin_backward(
        self, *, is_last: bool, stage: int = 0, rest: Sequence[torch.Tensor] | None = None
    ) -> None:
        """Say that a backward begins; in the last one of a stage, its full buckets may start.

        `rest` are the weights of the second half of one that has begun before. The gradients of all
        others are there already. None stands for a first half, or a whole one.
        """
        self._is_last = False
        if not self._buckets:
            return
        if rest is None:
            self._num_backwards[stage] += 1
            for bucket in self._buckets:
                if stage in bucket.stages:
                    bucket.num_backwards += 1
        if self._num_backwards[stage] > 1:
            self._has_seen_backward.add(stage)
        if is_last and stage in self._has_seen_backward:
            self.expect_last(stage, rest)

    def expect_last(self, stage: int = 0, rest: Sequence[torch.Tensor] | None = None) -> None:
        """Say that the next backward is the last of its stage in this step: buckets may start."""
        self._is_last = self.starts_inside and not self._comes_in_parts
        left: Collection[int] | None = None if rest is None else {id(weight) for weight in rest}
        for bucket in self._buckets:
            bucket.is_final = stage in bucket.stages and bucket.stages <= {*self._ended, stage}
            if bucket.is_final and left is not None:
                bucket.num_missing = sum(id(weight) in left for weight in bucket.parameters)
        if self._is_last and left is not None:
            self._start_full()

    def sizes_left(self, stage: int) -> list[int]:
        """The bytes of each all-reduce that can start when the gradients of this stage are done."""
        ended = {*self._ended, stage}
        waiting = self._buckets[self._num_started :]
        return [
            bucket.flat.nbytes
            for bucket in itertools.takewhile(lambda bucket: bucket.stages <= ended, waiting)
        ]

    def end_stage(self, stage: int) -> None:
        """Say that the gradients of a stage are done: start its all-reduces."""
        self._is_last = False
        self._ended.add(stage)
        self._has_seen_backward.add(stage)
        while (
            self._num_started < len(self._buckets)
            and self._buckets[self._num_started].stages <= self._ended
        ):
            self.start_one()

    def start_rest(self) -> None:
        """Start the all-reduces that have not started yet."""
        self._has_seen_backward.update(*(bucket.stages for bucket in self._buckets))
        while self._num_started < len(self._buckets):
            self.start_one()

    def finish(self) -> None:
        """Start the remaining all-reduces, wait for all, and drop gradients that no rank has."""
        self.start_rest()
        for bucket in self._buckets:
            bucket.work.wait()
            bucket.work = None
            self._require_equal_values(bucket)
            num_parameters = len(bucket.parameters)
            if len(bucket.used) < num_parameters:
                counts = bucket.counts.tolist()
                for index, parameter in enumerate(bucket.parameters):
                    is_there = 0 < counts[index] < FROZEN
                    if counts[index] >= FROZEN:
                        self._require_frozen_everywhere(bucket, index, counts[index])
                    parameter.grad = bucket.views[index] if is_there else None
        self._num_sums += 1

    def _require_equal_values(self, bucket: Bucket) -> None:
        """Refuse a parameter that has other values on other ranks. A GPU is not waited for."""
        own = bucket.sample
        if own is None:
            return
        bucket.num_ranks = bucket.num_ranks or dist.get_world_size(bucket.group)
        mean = bucket.sample_place.item() / bucket.num_ranks
        if mean != own and abs(mean - own) > _rounding(bucket.flat.dtype) * max(
            abs(own), abs(mean)
        ):
            raise RuntimeMismatchError(
                f"{self._text(self._sampled(bucket))} has other values on other ranks that hold it;"
                " somebody has changed it on some ranks only, or the optimizer draws random"
                " numbers: change it alike on all of them, or use pipeline.load or load_weights"
            )

    def _require_frozen_everywhere(self, bucket: Bucket, index: int, count: float) -> None:
        """Refuse a parameter that is frozen on some ranks, and trained on others."""
        if count != FROZEN * dist.get_world_size(bucket.group):
            raise RuntimeMismatchError(
                f"{self._text(bucket.parameters[index])} is frozen on some ranks that hold it, but"
                " not on all; set requires_grad alike on every rank"
            )

    def _text(self, parameter: nn.Parameter) -> str:
        """What messages call a parameter."""
        name = self.name_of.get(id(parameter))
        shape = tuple(parameter.shape)
        return f"parameter {printable(name)!r}:" if name else f"parameters: one of shape {shape}"

    def _sampled(self, bucket: Bucket) -> nn.Parameter:
        """The parameter whose values are compared in this step."""
        return bucket.parameters[self._num_sums % len(bucket.parameters)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, backwards are nobody's step: their gradients are left alone."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _make_hook(self, bucket: Bucket, index: int) -> Any:
        def arrived(parameter: torch.Tensor) -> None:
            if self._is_paused:
                return
            bucket.used.add(index)
            if bucket.num_arrivals:
                self._count(bucket, index)
            view, gradient = bucket.views[index], parameter.grad
            if gradient is not view and gradient is not None:  # the first of this step
                if gradient.layout is torch.strided:
                    view.copy_(gradient)
                else:
                    view.zero_().add_(gradient)
                parameter.grad = view
            if self._is_last and bucket.is_final:
                bucket.num_missing -= 1
                self._start_full()

        return arrived

    def _start_full(self) -> None:
        """Start the all-reduces whose gradients are all there, in their order."""
        while (
            self._num_started < len(self._buckets)
            and self._buckets[self._num_started].num_missing <= 0
        ):
            self.start_one()
            self.started_inside += 1

    def _count(self, bucket: Bucket, index: int) -> None:
        """Notice gradients that arrive in parts."""
        bucket.num_arrivals[index] += 1
        if bucket.num_backwards and bucket.num_arrivals[index] > bucket.num_backwards:
            self._comes_in_parts, self._is_last = True, False
            if bucket.work is not None:
                raise RuntimeMismatchError(
                    "model: a gradient arrives in parts, after its sum over ranks has begun; use"
                    " torch.utils.checkpoint with use_reentrant=False"
                )

    def start_one(self) -> None:
        """Start the next all-reduce; its gradients are there."""
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        counts = bucket.counts
        if len(bucket.used) == len(bucket.parameters):
            counts.fill_(1.0)
        else:
            for index, view in enumerate(bucket.views):
                is_used = index in bucket.used
                is_trained = is_used or bucket.parameters[index].requires_grad
                counts[index] = float(is_used) if is_trained else FROZEN
                if not is_used:
                    view.zero_()  # it holds what an earlier step left
        if bucket.flat.device.type == "cpu" and bucket.flat.is_floating_point():
            values = self._sampled(bucket).detach().reshape(-1)
            stride = max(1, values.numel() // MOST_VALUES)
            norm = torch.linalg.vector_norm(values[self._num_sums % stride :: stride])
            bucket.sample = norm.item()
            bucket.sample_place.fill_(bucket.sample)
        if self._notes is not None and bucket is self._buckets[-1]:
            self._notes.write()
        bucket.work = self.start_sum(bucket.flat, bucket.group)


def _rounding(dtype: torch.dtype) -> float:
    """By how much two sums of equal values may differ, as a part of them."""
    rounding: float = max(DRIFT, torch.finfo(dtype).eps ** 0.75)
    return rounding


def start_sum(tensor: torch.Tensor, group: Any) -> Any:
    """Start to sum a tensor over a group of ranks; the result can be waited for."""
    return dist.all_reduce(tensor, group=group, async_op=True)
