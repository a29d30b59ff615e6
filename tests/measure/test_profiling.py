"""Profiles of real models: layers, parameters and bytes against counts by hand."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from measure.model_samples import FLOAT, SAMPLES, HandWrittenCnn, sequential  # noqa: E402
from pipeplan import measure  # noqa: E402
from pipeplan.errors import InputError, RuntimeMismatchError  # noqa: E402
from pipeplan.measure import measure_model  # noqa: E402
from pipeplan.splitting import lay_out  # noqa: E402

HUGGING_FACE = {"gpt2", "bert", "llama", "vit", "mixtral"}


def measured(sample, **options):
    options = {"repeats": 1, "loss_fn": sample.loss_fn, "targets": sample.targets, **options}
    return measure_model(sample.model, sample.batch, **options)


def state_of(model):
    return [
        copy.deepcopy(model.state_dict()),
        [module.training for module in model.modules()],
        [name for name, _ in model.named_modules()],
        getattr(getattr(model, "config", None), "use_cache", None),
    ]


@pytest.mark.parametrize("kind", SAMPLES)
def test_counts_are_exact(kind):
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    sample = SAMPLES[kind]()
    sample.model.eval()
    before, random_state = state_of(sample.model), torch.get_rng_state()
    found = measured(sample)
    profile = found.profile
    assert [layer.name for layer in profile.layers] == sample.names
    assert [layer.name for layer in profile.layers] == list(lay_out(sample.model).names)
    assert [layer.parameter_bytes / FLOAT for layer in profile.layers] == sample.parameters
    cut_bytes = sample.cut_elements * FLOAT
    assert [layer.output_bytes for layer in profile.layers[:-1]] == [cut_bytes] * (
        len(sample.names) - 1
    )
    assert [layer.gradient_bytes for layer in profile.layers[:-1]] == [cut_bytes] * (
        len(sample.names) - 1
    )
    assert profile.input_bytes == sample.input_bytes
    assert profile.microbatch_size == 4
    assert profile.tied == sample.tied
    for layer in profile.layers:
        assert layer.forward_ms > 0
        assert 0 < layer.weight_grad_ms <= layer.backward_ms
        assert layer.activation_bytes > 0
        assert layer.weight_grad_bytes > 0
    after = state_of(sample.model)
    assert after[1:] == before[1:]
    assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
    assert all(parameter.grad is None for parameter in sample.model.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("kind", ["gpt2", "cnn"])
def test_a_measured_model_still_computes_the_same(kind):
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    sample = SAMPLES[kind]()
    sample.model.eval()

    def run():
        call = sample.batch if isinstance(sample.batch, dict) else {"images": sample.batch}
        output = sample.model(**call)
        return getattr(output, "logits", output)

    before = run()
    measured(sample)
    assert torch.equal(run(), before)


class ManualClock:
    """A clock that only `Worker` moves on."""

    now_ms = 0.0

    def mark(self):
        return ManualClock.now_ms

    def ms_between(self, start, end):
        return end - start

    def flops_between(self, start, end):
        return 0.0


@pytest.fixture
def manual_clock(monkeypatch):
    monkeypatch.setattr("pipeplan.measure.profiling.clock_of", lambda device: ManualClock())


class Worker(nn.Module):
    """Takes so many ms: forward, gradient of the input, gradient of the weight."""

    def __init__(self, *ms, by_rows=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.ms, self.by_rows = ms, by_rows

    def forward(self, x):
        factor = len(x) / 4 if self.by_rows else 1.0
        return Work.apply(x, self.weight, tuple(factor * ms for ms in self.ms))


class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ms):
        ManualClock.now_ms += ms[0]
        ctx.ms = ms
        return x + weight

    @staticmethod
    def backward(ctx, gradient):
        if ctx.needs_input_grad[0]:
            ManualClock.now_ms += ctx.ms[1]
        if ctx.needs_input_grad[1]:
            ManualClock.now_ms += ctx.ms[2]
        return gradient, gradient.sum(0), None


@pytest.mark.usefixtures("manual_clock")
def test_times_are_those_of_the_layers():
    """The first layer's input needs no gradient, so it computes none."""
    model = nn.Sequential(Worker(10, 20, 30), nn.Identity(), Worker(30, 10, 20))
    found = measure_model(model, torch.ones(4, 4), repeats=3)
    first, nothing, last = found.profile.layers
    assert (first.forward_ms, first.backward_ms) == pytest.approx((10, 30))
    assert (last.forward_ms, last.backward_ms) == pytest.approx((30, 30))
    assert (nothing.forward_ms, nothing.backward_ms) == (0, 0)
    assert (found.whole_forward_ms, found.whole_backward_ms) == pytest.approx((40, 60))
    assert found.difference == pytest.approx(0)
    assert found.num_runs == 3


@pytest.mark.usefixtures("manual_clock")
def test_times_at_several_sizes():
    model = nn.Sequential(Worker(20, 20, 20, by_rows=True), Worker(10, 10, 10))
    profile = measure.profile(model, torch.ones(4, 4), at=[8, 1, 4], repeats=2)
    assert profile.microbatch_size == 4
    scaling, constant = profile.layers
    assert [times.microbatch_size for times in scaling.at] == [8, 1]
    assert [times.forward_ms for times in scaling.at] == pytest.approx([40, 5])
    assert [times.backward_ms for times in scaling.at] == pytest.approx([40, 5])
    assert [times.backward_ms for times in constant.at] == pytest.approx([20, 20])


def test_weights_part_of_a_backward():
    """Linear layers: both products cost the same; weights need a bias's sum and additions, too."""
    model = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 256), nn.Linear(256, 4, bias=False))
    model[2].weight.requires_grad_(False)
    profile = measure.profile(model, torch.randn(512, 4), estimate="1,1")
    first, middle, frozen = profile.layers
    assert first.weight_grad_ms == first.backward_ms
    assert middle.weight_grad_ms == pytest.approx(middle.backward_ms * 2 / 3, rel=0.01)
    assert frozen.weight_grad_ms == 0
    assert frozen.weight_grad_bytes == 0
    # Between the two halves, the input of the layer and the gradient of its output are kept.
    assert middle.weight_grad_bytes == 2 * 512 * 256 * FLOAT
    assert middle.activation_bytes == 512 * 256 * FLOAT
    assert first.activation_bytes == 512 * 4 * FLOAT
    assert first.weight_grad_bytes == 512 * (4 + 256) * FLOAT


def test_layers_whose_backward_is_not_split_have_nothing_left_for_the_weights():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self[0], x, use_reentrant=False)

    inner = Checkpointed(nn.Linear(8, 8))
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))
    first, checkpointed, last = measure.profile(model, torch.randn(4, 8), repeats=1).layers
    assert checkpointed.weight_grad_bytes == 0
    assert checkpointed.weight_grad_ms < checkpointed.backward_ms / 10
    assert first.weight_grad_bytes == last.weight_grad_bytes == 2 * 4 * 8 * FLOAT


def test_frozen_layers_need_no_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    profile = measure.profile(model, torch.randn(4, 8), estimate="1,1")
    assert [layer.backward_ms > 0 for layer in profile.layers] == [False, False, True]
    assert [layer.gradient_bytes for layer in profile.layers[:2]] == [0, 0]


def test_rows_are_repeated_or_left_out():
    sample = sequential()
    for rows in (1, 3, 9):
        profile = measured(sample, microbatch_size=rows).profile
        assert profile.microbatch_size == rows
        assert profile.input_bytes == rows * 32 * FLOAT
        assert profile.layers[0].output_bytes == rows * 32 * FLOAT


def test_what_cannot_be_measured_is_refused_in_one_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def refused(match, model=model, batch=None, error=InputError, **options):
        batch = torch.ones(2, 4) if batch is None else batch
        with pytest.raises(error, match=match) as raised:
            measure_model(model, batch, **{"repeats": 1, **options})
        assert "\n" not in str(raised.value)

    refused("batch: the model cannot take it: RuntimeError: mat1", batch=torch.ones(2, 5))
    refused("batch: the model cannot take it: TypeError", batch={"wrong": torch.ones(2, 4)})
    refused("has no list of at least", nn.Linear(4, 4), error=RuntimeMismatchError)
    refused("layer '0' holds NaN", batch=torch.full((2, 4), torch.nan))
    refused("loss: is not finite", loss_fn=lambda output, _: output.sum() * torch.inf)
    refused("loss: has shape", loss_fn=lambda output, _: output)
    refused("estimate: 'b100' is neither", estimate="b100")
    refused("microbatch size: 0 is below 1", microbatch_size=0)
    refused("repeats: 0 is below 1", repeats=0)
    refused("batch: cannot be made: IndexError", batch=lambda: [][0])

    def no_memory():
        raise MemoryError

    refused(r"too large for the memory of this device.*--estimate", model=no_memory)


def test_a_model_of_functions():
    sample = sequential()
    found = measure_model(
        lambda: sample.model,
        lambda: sample.batch,
        loss_fn=sample.loss_fn,
        targets=lambda: sample.targets,
        repeats=1,
        name="mine",
    )
    assert found.profile.name == "mine"
    assert found.num_runs == 1


def test_batch_norm_keeps_its_means():
    model = HandWrittenCnn()
    before = model.units[0].norm.running_mean.clone()
    measure.profile(model, torch.randn(4, 3, 16, 16), repeats=1)
    assert torch.equal(model.units[0].norm.running_mean, before)


def test_autocast_makes_cuts_smaller():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    profile = measure.profile(model, torch.randn(4, 8), repeats=1, amp_dtype=torch.bfloat16)
    assert profile.layers[0].output_bytes == 4 * 8 * 2
    assert profile.layers[0].parameter_bytes == (8 * 8 + 8) * FLOAT


def test_progress_is_told():
    told = []
    sample = sequential()
    measured(sample, repeats=2, at=[1], tell=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


class Twice(nn.Module):
    """Runs its list of layers twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


def test_layers_that_run_twice_are_refused():
    with pytest.raises(RuntimeMismatchError, match=r"calls the layer 'layers\.0' more than once"):
        measure.profile(Twice(), torch.randn(2, 4), repeats=1)


def test_a_size_that_a_model_cannot_take_is_named():
    """BatchNorm cannot train on one row."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"at: .* at 1 row; give other sizes \(at=\[2\]\)"):
        measure_model(model, torch.ones(4, 4), at=[1], repeats=1)
