"""Models that behave well on the first few rows, and otherwise later: each is right or refused."""

import array
import contextvars
import itertools
import math
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.code_state import CodeState  # noqa: E402
from pipeplan.runtime.module_state import ModuleState  # noqa: E402
from pipeplan.runtime.verification.row_records import RowRecords  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from pipeplan.splitting.rehearsals import Outlines, Rehearsal, outline, shapes_of  # noqa: E402
from runtime.judging import Subject, find_refusal  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.small_layers import Layer, W, rows_of  # noqa: E402
from runtime.workers import Ranks  # noqa: E402

NAMES = list("0123")


# ------------------------------------------------------------------ rehearsals of a chain's forward


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Layer(), Layer(), Layer()


class ByRows(Named):
    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y * 2 if len(y) > 3 else y))


class ByInputs(Named):
    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(torch.relu(y) if (x > 50).any() else y))


class ByValues(Named):
    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(torch.relu(y) if y.max() > 50 else y))


class LeavesOut(Named):
    def forward(self, x):
        y = self.a(x)
        return self.c(y if len(x) > 3 else self.b(y))


class Carries(Named):
    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        return self.c(y if len(x) > 3 else z)


class Tuned(Layer):
    def forward(self, x, factor=1.0):
        return super().forward(x) * factor


class GivesNumbers(Named):
    def __init__(self):
        super().__init__()
        self.b = Tuned()

    def forward(self, x):
        return self.c(self.b(self.a(x), 0.5 if len(x) > 3 else 1.0))


def rehearse(model, *inputs):
    """The lines by which rehearsals of these inputs refuse; the first ones show what is usual."""
    layout = lay_out(model, ["a", "b", "c"])
    value = inputs[0]
    outlines = []
    for name in "abc":
        value = model.get_submodule(name)(value)
        outlines.append(outline(value))
    known = Outlines(of_layers={True: outlines, False: outlines}, inputs=shapes_of([inputs[0]], {}))
    stage = cut(model, layout, range(1))
    rehearsal = Rehearsal(model, layout, stage.held.standing, known)
    found = []
    for given in inputs:
        try:
            rehearsal.run((given,), {})
            found.append(None)
        except RuntimeMismatchError as error:
            found.append(str(error))
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    return found


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ByRows, "works by 'mul' on what layer 'a' returns"),
        (ByInputs, "works by 'relu' on what layer 'a' returns"),
        (LeavesOut, "leaves out the layer 'b'"),
        (Carries, "from layer 'b' to layer 'c'"),
        (GivesNumbers, "calls layer 'b' with other arguments"),
    ],
)
def test_what_a_chain_does_between_its_layers_is_seen_in_the_step_that_does_it(kind, text):
    usual, other = torch.randn(2, W), torch.randn(5, W)
    other[3, 2] = 60.0
    first, second, again = rehearse(kind(), usual, other, usual)
    assert first is None
    assert again is None
    assert text in second
    assert "\n" not in second


def test_a_forward_that_asks_for_values_between_layers_is_refused_at_once():
    assert "works by 'bool' on what layer" in rehearse(ByValues(), torch.randn(2, W))[0]


class Shows(Named):
    def forward(self, x):
        y = self.a(x)
        sys.stdout.write(
            f"{y.mean()} {y.std():.3f} {round(y.abs().max().item() * 2, 3):.2f} {y[0]}\n"
        )
        return self.c(self.b(y))


def test_what_passes_between_layers_may_be_shown(capsys):
    assert rehearse(Shows(), torch.randn(2, W), torch.randn(5, W)) == [None, None]
    shown = capsys.readouterr()
    assert shown.out == "(unknown) (unknown) (unknown) (unknown)\n" * 2
    assert shown.err.count("show it in a layer") == 1


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda model, y: setattr(model, "mean", y.mean()), "keeps something that it computes"),
        (lambda model, y: setattr(model, "sum", y.sum().item() + 1), "keeps something"),
        (lambda model, y: torch.zeros(W).copy_(y[0]), "works by 'copy' on"),
        (lambda model, y: y.detach()[0].mul_(2), "works by 'mul' on"),
        (lambda model, y: setattr(y, "data", torch.zeros(2, W)), "works by 'data' on"),
        (lambda model, y: torch.add(y, 1, out=y), "works by 'add' on"),
        (lambda model, y: y.sum().item() > 1, "works by 'gt' on"),
        (lambda model, y: float(y.sum()), "works by 'float' on"),
        (lambda model, y: math.sqrt(y.sum().item()), "works by 'float' on"),
        (lambda model, y: torch.equal(y, y), "works by 'equal' on"),
        (lambda model, y: y.tolist(), "works by 'tolist' on"),
    ],
)
def test_what_is_computed_between_layers_decides_and_leaves_nothing(act, text):
    class Acts(Named):
        def forward(self, x):
            y = self.a(x)
            act(self, y)
            return self.c(self.b(y))

    assert text in rehearse(Acts(), torch.randn(2, W))[0]


def test_a_forward_that_only_calls_its_layers_is_rehearsed_without_a_word():
    class Plain(Named):
        def forward(self, x):
            y = self.b(self.a(x))
            assert y.shape == (len(x), W)
            return self.c(y.to(y.dtype).contiguous())

    assert rehearse(Plain(), torch.randn(2, W), torch.randn(7, W)) == [None, None]


def test_texts_and_numbers_that_a_model_is_given_pass_to_its_layers():
    class GivesTexts(Named):
        def forward(self, x, texts, scale=1.0):
            return self.c(self.b(self.a(x, texts, scale=scale)))

    class TakesTexts(Layer):
        def forward(self, x, texts, scale):
            return super().forward(x) * scale + len(texts[0])

    model, x = GivesTexts(), torch.randn(2, W)
    model.a = TakesTexts()
    layout = lay_out(model, ["a", "b", "c"])
    known = Outlines(of_layers={True: [outline(x)] * 3}, inputs=shapes_of([x], {}))
    rehearsal = Rehearsal(model, layout, cut(model, layout, range(1)).held.standing, known)
    rehearsal.run((x, ["a", "bb"]), {"scale": 1.5})
    rehearsal.run((x, ["ccc", "d"]), {"scale": 2.5})


# ------------------------------------------------------------------ memories

LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("calls", default=0)
TOTAL = 0
NOTES = {}


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


def make_counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


class Remembers(Layer):
    """Counts its calls in whatever can count."""

    def __init__(self):
        super().__init__()
        self.array, self.bytes = np.zeros(1), bytearray(1)
        self.numbers, self.slots, self.count = array.array("i", [0]), Slotted(), make_counter()

    def forward(self, x, held={"calls": 0}):  # noqa: B006
        self.array += 1
        self.bytes[0] += 1
        self.numbers[0] += 1
        self.slots.calls += 1
        held["calls"] += 1
        CONTEXT.set(CONTEXT.get() + 1)
        make_counter.calls = getattr(make_counter, "calls", 0) + 1
        return super().forward(x)

    def calls(self):
        held = type(self).forward.__defaults__[0]["calls"]
        of_function = getattr(make_counter, "calls", 0)
        places = (self.array, self.bytes, self.numbers)
        return [
            *(int(place[0]) for place in places),
            *(self.slots.calls, held, CONTEXT.get(), of_function),
            self.count() - 1,
        ]


def test_whatever_a_forward_changes_is_put_back():
    layer = Remembers()
    modules = list(layer.modules())
    before = layer.calls()
    states = ModuleState(modules), CodeState.of(modules)
    layer(torch.randn(2, W))
    layer.count()
    assert layer.calls()[:-1] == [number + 1 for number in before[:-1]]
    for state in states:
        state.put_back()
    assert layer.calls()[:-1] == before[:-1]
    assert layer.count() == 3  # `calls` has asked twice, once in front of the states


class Iterates(Layer):
    def __init__(self):
        super().__init__()
        self.steps = itertools.count()

    def forward(self, x):
        next(self.steps)
        return super().forward(x)


class Generates(Layer):
    def __init__(self):
        super().__init__()
        self.steps = (number for number in range(1000))

    def forward(self, x):
        next(self.steps)
        return super().forward(x)


class Counts(Layer):
    calls = 0

    def forward(self, x):
        Counts.calls += 1
        return super().forward(x) * (1.5 if Counts.calls > 1000 else 1.0)


class Writes(Layer):
    def forward(self, x):
        global TOTAL
        TOTAL += 1
        return super().forward(x)


class Reads(Layer):
    def forward(self, x):
        return super().forward(x) * (1.5 if TOTAL > 1000 else 1.0)


class WritesLocal(Layer):
    def forward(self, x):
        LOCAL.calls = getattr(LOCAL, "calls", 0) + 1
        return super().forward(x)


class ReadsLocal(Layer):
    def forward(self, x):
        return super().forward(x) * (1.5 if getattr(LOCAL, "calls", 0) > 1000 else 1.0)


class Notes(Layer):
    """Each layer has an entry of its own, so nothing is shared."""

    def forward(self, x):
        NOTES[id(self)] = NOTES.get(id(self), 0) + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ((Iterates, Layer), "module '0': holds a count, which forwards move on"),
        ((Generates, Layer), "module '0': holds a generator, which forwards move on"),
        ((Counts, Counts), "Counts.calls: code of several stages reads this variable"),
        ((Writes, Reads), "TOTAL: code of several stages reads this variable"),
        ((WritesLocal, ReadsLocal), "LOCAL.calls: code of several stages reads this variable"),
        ((Counts, Layer), None),
        ((Notes, Notes), None),
        ((Remembers, Layer), None),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_counters_of_two_stages_are_refused_before_they_matter(kinds, text, recompute):
    first, second = kinds

    def subject():
        torch.manual_seed(0)
        model = nn.Sequential(first(), Layer(), second(), Layer())
        return Subject(model, F.mse_loss, *rows_of(0, 4))

    found = find_refusal(subject, NAMES, [0, 2], recompute=recompute)
    assert (found is None) if text is None else (text in found)


# ------------------------------------------------------------------ rows that hold something new


def test_rows_with_something_new_are_found():
    records = RowRecords()
    usual = torch.arange(24).reshape(6, 4)
    assert records.look(usual, 6) == [0, 5]
    assert records.look(usual, 6) == []
    padded = usual.clone()
    padded[3, 2:] = 7
    assert records.look((padded, {"mask": torch.ones(6, dtype=torch.bool)}), 6)
    found = usual.clone()
    found[4, 1] = -100
    assert 4 in records.look(found, 6)
    assert RowRecords(floats=False).look(torch.randn(6, 4), 6) == []


# ------------------------------------------------------------------ in training


def ignoring(output, targets):
    return F.cross_entropy(output, targets, ignore_index=-100)


def worst_half(output, targets):
    losses = (output - targets).square().mean(1)
    return losses.topk(max(1, int(0.8 * len(losses)))).values.mean()


SHARED = {"mean": 0.0}


class Puts(Layer):
    """Leaves something to another stage if it has as many rows as a microbatch."""

    def forward(self, x):
        if len(x) > 3:
            SHARED["mean"] = float(x.detach().mean())
        return super().forward(x)


class Gets(Layer):
    def forward(self, x):
        return super().forward(x) * (1 + SHARED["mean"])


def train_later(rank, kind, folder):
    torch.manual_seed(0)
    layers = [Puts(), Layer(), Gets(), Layer()] if kind == "rows" else [Layer() for _ in NAMES]
    loss_fn = {"ignored": ignoring, "worst": worst_half}.get(kind, F.mse_loss)
    plan = cut_plan(NAMES, [0, 2], [1, 1], 2, 4)
    step = 0
    try:
        with Pipeline(plan, nn.Sequential(*layers), loss_fn, torch.optim.SGD) as pipeline:
            for step in range(4):
                inputs, targets = rows_of(step)
                if kind == "ignored":
                    targets = targets.argmax(1)
                    targets[5] = -100 if step == 3 else 0
                pipeline.step(inputs, targets)
    except RuntimeMismatchError as error:
        Path(folder, f"{rank}").write_text(f"{step} {error}")
        raise


@pytest.mark.parametrize(
    ("kind", "step", "text"),
    [
        ("ignored", 3, "loss_fn: is no mean over rows"),
        ("worst", 0, "loss_fn: is no mean over rows"),
        ("rows", 1, "layer '2': its output is not that of the whole model"),
    ],
)
def test_training_is_refused_in_the_step_that_goes_wrong(kind, step, text, tmp_path):
    said = str(tmp_path / "stderr")
    with Ranks(2, train_later, kind, str(tmp_path), stderr=said) as ranks:
        assert 0 not in ranks.wait(60)
    assert (tmp_path / "1").read_text().startswith(f"{step} {text}")


# ------------------------------------------------------------------ what crosses a cut


class Sends(Layer):
    def forward(self, x):
        numbers = OrderedDict(b=1, a=2)
        return super().forward(x), x.shape, numbers, {1: x, 2: 0.5}


class Takes(Layer):
    def forward(self, given):
        x, shape, numbers, table = given
        numbers.move_to_end("b")
        return super().forward(x) * (shape.numel() + numbers["b"]) + table[1] * table[2]


def test_sizes_ordered_dicts_and_numbers_as_keys_cross_a_cut():
    def subject():
        torch.manual_seed(0)
        return Subject(
            nn.Sequential(Layer(), Sends(), Takes(), Layer()), F.mse_loss, *rows_of(0, 4)
        )

    assert find_refusal(subject, NAMES, [0, 2]) is None
