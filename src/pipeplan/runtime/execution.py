"""Runs one replica's blocks: a microbatch forward or backward through its stage.

A backward is one block, or two: the gradients of what enters, and later those of the weights
(`splitting.split_backward`). Between the two, the stage keeps what the second one needs.

Random numbers: every block seeds torch's generators by (seed, step, stage, microbatch, replica).
The first block of a step seeds those of Python and numpy, too. So a run repeats bit by bit. With
recomputation every block seeds all of them, so that it draws the same numbers as the forward.
Different replicas and microbatches drop different elements.

State: with recomputation, modules get back the buffers and attributes that they had in front of the
first forward, and afterwards those that they had before the second. So nothing counts twice.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.code_state import KeptState
from pipeplan.runtime.code_variables import Variable
from pipeplan.runtime.extra_losses import collect_losses, sum_of_losses
from pipeplan.runtime.kept_microbatches import (
    Kept,
    known_roots,
    roots_of,
    run_whole,
    small_roots_of,
)
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.random_state import BlockSeeds, seed_all, seed_torch
from pipeplan.runtime.stage_inputs import cloned, entered
from pipeplan.runtime.stage_outputs import exits_of
from pipeplan.splitting.nesting import put_tensors, take_tensors, tensors_in
from pipeplan.splitting.split_backward import (
    Root,
    SavedBoxes,
    WeightHalf,
    run_input_half,
)
from pipeplan.splitting.stage_modules import StageModule
from pipeplan.splitting.torch_private import count_changes

__all__ = ["StageRunner"]

NOTHING = contextlib.nullcontext()


class StageRunner:
    """Runs the blocks of one replica, without any communication."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        *,
        seeds: BlockSeeds,
        recompute: bool,
        amp_dtype: torch.dtype | None,
        loss: LossTerms | None,
        splits: bool = False,
    ) -> None:
        """`splits` says whether backwards come in two halves, some or all of them."""
        self._module, self._device, self._seeds = module, device, seeds
        self._recompute, self._amp_dtype = recompute, amp_dtype
        self._loss = loss
        self._where = f"layers {module.layers_text}"
        self._kept: dict[int, Kept] = {}
        self._halves: dict[int, WeightHalf] = {}  # what the weights' gradients need
        self._boxes = SavedBoxes() if splits else None
        self._evaluates = self._runs_again = False
        self._clones_inputs = self._is_checked = False
        self._seeds_all = self._seeds_each = True  # Python and numpy: the next block, and each one
        self.on_output: Callable[[Any, Any], None] | None = None
        """Is called with the output and the targets of the next microbatch of the last stage."""
        self._extra: list[torch.Tensor] = []
        self._front: KeptState | None = None  # in front of the last forward
        self._changing: tuple[list[nn.Module], list[Variable]] | None = None
        self.extra_loss: torch.Tensor | None = None
        """What layers added to the loss in the last forward, times the rows' share of the batch.
        None if they added nothing."""

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return self._device

    @property
    def clones_inputs(self) -> bool:
        """Whether layers have changed their inputs in place, and get copies since then."""
        return self._clones_inputs

    def clone_inputs(self) -> None:
        """Give layers copies of their inputs from now on: they change them in place."""
        self._clones_inputs = True

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside: forwards keep nothing, and layers are in evaluation mode."""
        modes = [(module, module.training) for module in self._module.model.modules()]
        self._module.model.eval()
        self._evaluates = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._evaluates = False
            for module, training in modes:
                module.training = training

    def begin_step(self) -> None:
        """Begin with the blocks of a step."""
        self._seeds_all, self._seeds_each = True, self._recompute

    def on(self, device: torch.device) -> "StageRunner":
        """The same runner for another device, to which its module was moved."""
        other = copy.copy(self)
        other._device, other._kept, other._halves = device, {}, {}
        return other

    def sharing_casts(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, microbatches share the parameters that autocast casts to lower precision.

        Autocast forgets its casts when the outermost autocast context ends. Without a context
        around all microbatches, each would keep its own casts for the backward. Recomputation
        needs none: there only one microbatch has casts at a time, and a cast made without
        gradients must not be reused with gradients.
        """
        if self._amp_dtype is None or self._recompute:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, enabled=False)

    def forward(
        self,
        step: int,
        microbatch: int,
        carried: list[torch.Tensor],
        template: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        row_share: float = 0.0,
        gradient_scale: float = 1.0,
    ) -> tuple[list[torch.Tensor], Any]:
        """The tensors that leave the stage, and the template that joins them.

        `row_share` is the rows' share of the batch, by which losses that layers add count.
        """
        seed = self._seeds.of(step, microbatch)
        call = (template, inputs)
        state = self._save_state() if self._recompute else None
        if self._is_plain():
            output = self._run(carried, call, seed)
        else:
            with self._grad_mode(), self._saving():
                output = self._run(carried, call, seed)
        if state is not None:
            self._learn_changes(state)
        tensors, shape = take_tensors(output, self._where)
        extra = self._take_extra(row_share)
        if not self._evaluates:
            roots = [] if self._recompute else self._roots_of(tensors)
            again = call if self._recompute else None
            scale = row_share * gradient_scale
            self._kept[microbatch] = Kept(carried, roots, None, again, seed, extra, scale, state)
        return tensors, shape

    def forward_last(
        self,
        step: int,
        microbatch: int,
        carried: list[torch.Tensor],
        template: Any,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        targets: Any,
        share: float,
        gradient_scale: float,
        *,
        row_share: float = 0.0,
    ) -> torch.Tensor:
        """The loss and the metrics of these rows, times the rows' share of the batch's weight."""
        seed = self._seeds.of(step, microbatch)
        call = (template, inputs, targets, share)
        state = self._save_state() if self._recompute else None
        if self._is_plain():
            loss, stats = self._run_loss(carried, call, seed)
        else:
            with self._grad_mode(), self._saving():
                loss, stats = self._run_loss(carried, call, seed)
        if state is not None:
            self._learn_changes(state)
        extra = self._take_extra(row_share)
        if not self._evaluates:
            roots = [] if self._recompute else self._roots_of([loss])
            again = call if self._recompute else None
            first = torch.full_like(loss, share * gradient_scale if share else 1.0)
            scale = row_share * gradient_scale
            self._kept[microbatch] = Kept(carried, roots, [first], again, seed, extra, scale, state)
        return stats

    def have_gradient(self, tensors: list[torch.Tensor]) -> list[bool]:
        """Which of the tensors that leave the stage may get a gradient.

        With recomputation only the second forward knows. So all that can have one may get one.
        """
        if self._recompute and not self._evaluates:
            return [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
        return [tensor.requires_grad for tensor in tensors]

    def backward(
        self, microbatch: int, grad_outputs: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradient of each input of the stage; `grad_outputs` are those of its outputs.

        None is the gradient of a tensor that has no influence on the loss. With recomputation, the
        backward takes large gradients out of the list.
        """
        return run_whole(*self._take_roots(microbatch, grad_outputs, is_whole=True))

    def backward_input(
        self, microbatch: int, grad_outputs: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The same without the gradients of weights; `backward_weight` computes those."""
        kept, roots = self._take_roots(microbatch, grad_outputs)
        if self._boxes is None or self._boxes.meets_checkpoints:
            self._halves[microbatch] = WeightHalf()
            return run_whole(kept, roots)
        edges = cast(list[Root], roots)  # small tensors stay only where backwards are whole
        gradients, half = run_input_half(edges, kept.carried, self._boxes)
        self._halves[microbatch] = half
        return gradients

    def weights_left(self, microbatch: int) -> list[torch.Tensor]:
        """The weights to whose gradients `backward_weight` will add."""
        return self._halves[microbatch].weights

    def backward_weight(self, microbatch: int) -> None:
        """Add the gradients of weights, after `backward_input`."""
        self._halves.pop(microbatch).run()

    def _take_roots(
        self, microbatch: int, grad_outputs: list[torch.Tensor | None], *, is_whole: bool = False
    ) -> tuple[Kept, list[tuple[torch.Tensor | GradientEdge, torch.Tensor]]]:
        """Where the backward of a microbatch begins; with recomputation, runs its forward again."""
        kept = self._kept.pop(microbatch)
        roots: Sequence[torch.Tensor | GradientEdge | None] = kept.roots
        extra = kept.extra_roots
        if kept.state is not None:
            now = self._state_of_blocks()
            kept.state.put_back()
            self._runs_again = True
            roots = self._forward_again(kept, grad_outputs if is_whole else None)
            self._runs_again = False
            extra = known_roots(self._extra)
            self._extra = []
            now.put_back()
        pairs = zip(roots, kept.grad_outputs or grad_outputs, strict=True)
        found = [(root, grad) for root, grad in pairs if root is not None and grad is not None]
        if extra:  # autograd makes it the type of each loss
            scale = torch.tensor(kept.extra_scale, dtype=torch.float64, device=self._device)
            found += [(root, scale) for root in extra]
        return kept, found

    def _roots_of(
        self, tensors: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | GradientEdge | None]:
        return small_roots_of(tensors) if self._boxes is None else roots_of(tensors)

    def _is_plain(self) -> bool:
        """Whether a first forward needs neither another mode of gradients nor boxes."""
        is_enabled = not self._evaluates and not self._recompute
        return self._boxes is None and torch.is_grad_enabled() is is_enabled

    def _grad_mode(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, a first forward runs with or without gradients, as it should."""
        is_enabled = not self._evaluates and not self._recompute
        if torch.is_grad_enabled() is is_enabled:
            return NOTHING
        return torch.set_grad_enabled(is_enabled)

    def _saving(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, autograd saves tensors so that half a backward can free them."""
        if self._boxes is None or not torch.is_grad_enabled():
            return NOTHING
        return self._boxes.packing()

    def _save_state(self) -> KeptState | None:
        """What the modules remember that a forward changes; None if no forward will run again."""
        if self._evaluates:
            return None
        self._front = self._state_of_blocks()
        return self._front

    def _state_of_blocks(self) -> KeptState:
        functions = [self._loss.loss_fn] if self._loss is not None else []
        return KeptState.now(self._module.model, functions, self._changing)

    def _learn_changes(self, state: KeptState) -> None:
        """Find out, in the first forward, which modules and variables remember something."""
        if self._changing is None:
            self._changing = state.changed()
            state.restrict(*self._changing)

    def _take_extra(self, row_share: float) -> list[GradientEdge]:
        """Where the backward of added losses begins; sums these losses up."""
        self.extra_loss = None
        if not self._extra:
            return []
        self.extra_loss = sum_of_losses(self._extra, row_share, self._device)
        extra = [] if self._recompute or self._evaluates else known_roots(self._extra)
        self._extra = []
        return extra

    def _forward_again(
        self, kept: Kept, gradients: list[torch.Tensor | None] | None
    ) -> list[GradientEdge | None]:
        """Where the backward begins; it takes the gradients, if they are given."""
        with self._saving():
            if kept.grad_outputs is not None:
                return roots_of([self._run_loss(kept.carried, kept.call, kept.seed)[0]])
            output = self._run(kept.carried, kept.call, kept.seed)
        tensors, _ = take_tensors(output, self._where)
        return roots_of(tensors) if gradients is None else exits_of(tensors, gradients)

    def _run(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        """The output of the layers.

        Layers may change their inputs in place. With recomputation they then get copies.
        """
        if self._clones_inputs:
            return self._run_on(cloned(carried), cloned(call[:2]), seed)
        if self._recompute and not self._runs_again:
            return self._run_and_compare(carried, call, seed)
        return self._run_on(entered(carried), call, seed)

    def _run_and_compare(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        """Run, and notice inputs that change in place; recomputation needs them unchanged."""
        tensors = [*carried, *tensors_in(call[1])]
        inside = entered(carried)
        watched = [*inside, *tensors[len(carried) :]]
        versions = [count_changes(tensor) for tensor in watched]
        backups = None if self._is_checked else [tensor.detach().clone() for tensor in tensors]
        self._is_checked = True
        output = self._run_on(inside, call, seed)
        if [count_changes(tensor) for tensor in watched] == versions:
            return output
        if backups is None:
            raise RuntimeMismatchError(
                f"layers {self._module.layers_text}: changed their inputs in place, but not in"
                " their first microbatch; with recompute they must not"
            )
        for tensor, backup in zip(tensors, backups, strict=True):
            tensor.data.copy_(backup)
        self._clones_inputs = True
        if self._front is not None:
            self._front.put_back()
        return self._run(carried, call, seed)

    def _run_on(self, carried: list[torch.Tensor], call: Any, seed: int) -> Any:
        template, (args, kwargs) = call[:2]
        if self._module.rehearsal is not None and not self._runs_again:
            self._module.rehearsal.run(args, kwargs)
        self._seed(seed)
        value = put_tensors(template, carried) if template is not None else None
        with collect_losses() as self._extra, self._autocast():
            return self._module(value, args, kwargs)

    def _run_loss(
        self, carried: list[torch.Tensor], call: Any, seed: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._loss is not None  # only the last stage has one
        output = self._run(carried, call, seed)
        _, _, targets, share = call
        if self.on_output is not None:
            look, self.on_output = self.on_output, None
            look(output, targets)
        loss = self._loss.of(output, targets, share, self._autocast())
        return loss, self._loss.with_metrics(loss, output, targets, share)

    def seed_block(self, step: int, microbatch: int) -> None:
        """Seed the generators as the first stage's first forward of a step does, on any rank."""
        seeds = replace(self._seeds, stage=0, replica=0)
        seed_all(seeds.of(step, microbatch), self._device)

    def _seed(self, seed: int) -> None:
        if self._seeds_all or self._seeds_each:
            seed_all(seed, self._device)
            self._seeds_all = False
        else:
            seed_torch(seed, self._device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._amp_dtype is None:
            return NOTHING
        return torch.autocast(self._device.type, dtype=self._amp_dtype)
