"""Judges, in one process, whether a cut model is compared rightly with the whole one."""

import json
import sys
import warnings
from dataclasses import dataclass

import torch

from pipeplan.errors import RuntimeMismatchError
from pipeplan.runtime.execution import StageRunner
from pipeplan.runtime.extra_losses import collect_losses
from pipeplan.runtime.loss_terms import LossTerms
from pipeplan.runtime.parameters import (
    LOSS_NAME,
    add_loss_holders,
    find_loss_module,
    first_names,
)
from pipeplan.runtime.random_state import BlockSeeds
from pipeplan.runtime.verification.stage_calls import Sample, StageCalls
from pipeplan.runtime.verification.stage_comparison import compare_stage, failed, first_difference
from pipeplan.splitting import cut, holders, lay_out
from pipeplan.splitting.nesting import map_tensors

CPU = torch.device("cpu")
torch.set_num_threads(1)  # these models are tiny


@dataclass
class Subject:
    """A model with its loss and a batch; made anew, and alike, for every run."""

    model: torch.nn.Module
    loss_fn: object
    batch: object
    targets: object


def samples_of(subject, count=2):
    """The batch as microbatches."""
    args = subject.batch if isinstance(subject.batch, tuple) else (subject.batch,)
    if isinstance(subject.batch, dict):
        args = ()
    kwargs = subject.batch if isinstance(subject.batch, dict) else {}
    rows = next(t.shape[0] for t in [*args, *kwargs.values()] if torch.is_tensor(t)) // count

    def pick(value, index):
        return map_tensors(value, lambda t: t[index * rows : (index + 1) * rows].clone())

    return [
        Sample(
            call=(pick(args, i), pick(kwargs, i)), targets=pick(subject.targets, i), num_rows=rows
        )
        for i in range(count)
    ]


def make_stage(
    make, names, cuts, index, *, recompute=False, keep_whole=False, amp_dtype=None, weight_fn=None
):
    subject = make()
    layout = lay_out(subject.model, names, cuts)
    ends = [*cuts[1:], layout.num_layers]
    stages = [range(a, b) for a, b in zip(cuts, ends, strict=True)]
    held_by = holders(subject.model, layout, stages)
    loss_module = find_loss_module(subject.model, subject.loss_fn)
    add_loss_holders(held_by, subject.model, loss_module, len(cuts) - 1)
    first_name_of = first_names(subject.model, loss_module)
    module = cut(subject.model, layout, stages[index], keep_whole=keep_whole)
    if loss_module is not None and module.is_last:
        module.attach(LOSS_NAME, loss_module)
    terms = LossTerms(loss_fn=subject.loss_fn, metrics={}, weight_fn=weight_fn)
    runner = StageRunner(
        module,
        CPU,
        seeds=BlockSeeds(seed=0, stage=index, replica=0),
        recompute=recompute,
        amp_dtype=amp_dtype,
        loss=terms if module.is_last else None,
    )
    stage = StageCalls(
        module=module,
        runner=runner,
        loss=terms,
        parameters={n: p for n, p in module.model.named_parameters() if p.requires_grad},
        device=CPU,
        amp_dtype=amp_dtype,
        first_name_of=first_name_of,
    )
    return stage, subject, held_by


def joined(subject):
    """All rows as one microbatch."""
    return samples_of(subject, 1)[0]


def find_refusal(make, names, cuts, *, recompute=False, amp_dtype=None, weight_fn=None):
    """The line by which the comparison refuses; None if it agrees."""
    reports = []
    for index in range(len(cuts)):
        stage, subject, held_by = make_stage(
            make,
            names,
            cuts,
            index,
            recompute=recompute,
            keep_whole=True,
            amp_dtype=amp_dtype,
            weight_fn=weight_fn,
        )
        try:
            reports.append(
                compare_stage(
                    stage,
                    samples_of(subject),
                    held_by,
                    recomputes=recompute,
                    joint=joined(subject),
                )
            )
        except RuntimeMismatchError as error:
            reports.append(failed(error))
    doubts = [report.whole_error for report in reports if report.whole_error]
    found = first_difference(reports, lambda size: 1e-5 * size) or (doubts[0] if doubts else None)
    for note in [report.note for report in reports if report.note and not found][-1:]:
        sys.stderr.write(f"{note}\n")
    return found


def train_cut(make, names, cuts, *, recompute=False):
    """The gradients and buffers of one batch, by stages that share nothing but messages."""
    with warnings.catch_warnings():
        # With recomputation the first forward has no gradients: a checkpoint inside warns of it.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        return _train_cut(make, names, cuts, recompute=recompute)


def _train_cut(make, names, cuts, *, recompute):
    stages = [
        make_stage(make, names, cuts, index, recompute=recompute)[0] for index in range(len(cuts))
    ]
    samples = samples_of(make())
    total_rows = sum(sample.num_rows for sample in samples)
    carried = [[None] * len(samples) for _ in stages]
    for m, sample in enumerate(samples):
        tensors, template = [], None
        share = sample.num_rows / total_rows
        for index, stage in enumerate(stages):
            carried[index][m] = tensors
            call = sample.copied().call if stage.module.needs_inputs else ((), {})
            if stage.module.is_last:
                stage.runner.forward_last(
                    0, m, tensors, template, call, sample.copied().targets, share, 1.0,
                    row_share=share,
                )  # fmt: skip
                break
            sent, template = stage.runner.forward(0, m, tensors, template, call, row_share=share)
            template = json.loads(json.dumps(template))
            have = stage.runner.have_gradient(sent)
            dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in sent]
            tensors = [t.requires_grad_(h) for t, h in zip(dense, have, strict=True)]
    for m in range(len(samples)):
        gradients = []
        for stage in reversed(stages):
            gradients = stage.runner.backward(m, gradients)
    found = {}
    buffers = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
        buffers.update(stage.module.model.named_buffers())
    return found, buffers


def train_whole(make):
    """The same in one process."""
    subject = make()
    samples = samples_of(subject)
    total_rows = sum(sample.num_rows for sample in samples)
    for sample in samples:
        share = sample.num_rows / total_rows
        args, kwargs = sample.copied().call
        with collect_losses() as extra:
            output = subject.model(*args, **kwargs)
            loss = subject.loss_fn(output, sample.targets)
        (loss * share + sum(extra) * share).backward()
    found = {n: p.grad for n, p in subject.model.named_parameters() if p.grad is not None}
    known = set(map(id, subject.model.parameters()))
    if isinstance(subject.loss_fn, torch.nn.Module):
        of_loss = subject.loss_fn.named_parameters(LOSS_NAME)
        found |= {name: p.grad for name, p in of_loss if id(p) not in known}
    return found, dict(subject.model.named_buffers())


def find_error(make, names, cuts, *, recompute=False):
    """What is wrong with training by stages; None if it is ordinary training."""
    try:
        found, buffers = train_cut(make, names, cuts, recompute=recompute)
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    expected, expected_buffers = train_whole(make)
    subject = make()
    first = first_names(subject.model, find_loss_module(subject.model, subject.loss_fn))
    merged = {}
    for name, value in found.items():
        merged[first.get(name, name)] = merged.get(first.get(name, name), 0) + value
    for name, value in expected.items():
        if name not in merged:
            if value.any():
                return f"no gradient of {name}"
        elif not torch.allclose(
            merged[name], value, rtol=1e-4, atol=1e-6 + 1e-5 * value.abs().max()
        ):
            return f"gradient of {name}"
    for name, value in expected_buffers.items():
        if name in buffers and not torch.allclose(
            buffers[name].double(), value.double(), rtol=1e-4, atol=1e-6
        ):
            return f"buffer {name}"
    return None
