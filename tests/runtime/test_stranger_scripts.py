"""Scripts and models that nobody had thought of: they are right, or refused in one line."""

import copy
import tempfile

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.runtime import Pipeline, RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.exchange.contents import describe  # noqa: E402
from pipeplan.runtime.exchange.packing import find_packing  # noqa: E402
from pipeplan.runtime.model_checks import require_whole  # noqa: E402
from pipeplan.runtime.optimizer_trials import OptimizerTrials  # noqa: E402
from pipeplan.runtime.settings_agreement import OptionWatch, require_same_options  # noqa: E402
from pipeplan.runtime.step_checks import SameModel  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.judging import Subject, find_refusal  # noqa: E402
from runtime.samples import cut_plan  # noqa: E402
from runtime.test_unseen_models import split_plan  # noqa: E402
from runtime.workers import run_ranks, share_from_first  # noqa: E402

W = 6
CHAIN = list("0123")
LIST = ["before", "blocks.0", "blocks.1", "blocks.2", "behind"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def rows_of(step, rows=8):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, W, generator=generator), torch.randn(rows, W, generator=generator)


def tokens_of(step, rows=8, length=5):
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(11, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Listed(nn.Module):
    def __init__(self, block=Layer, num_blocks=3):
        super().__init__()
        self.embed = nn.Linear(W, W)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(W, W)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(plan, make, data=rows_of, loss_fn=F.mse_loss, optimizer_fn=sgd, steps=4):
    """What is said; or the largest difference of losses and weights to ordinary training."""
    torch.manual_seed(1)
    model, text, found, losses, pipeline = make(), "", None, [], None
    reference = copy.deepcopy(model)
    try:
        pipeline = Pipeline(plan, model, loss_fn, optimizer_fn)
        losses = [pipeline.step(*data(step)) for step in range(steps)]
        found = pipeline.full_state_dict()
    except RuntimeMismatchError as error:
        text = str(error)
    dist.barrier()
    if pipeline is not None:
        pipeline.close()
    if text:
        return text
    optimizer, worst = optimizer_fn(reference.parameters()), 0.0
    for step in range(steps):
        optimizer.zero_grad()
        for inputs, targets in zip(*(each.chunk(2) for each in data(step)), strict=True):
            loss = loss_fn(reference(inputs), targets) / 2
            loss.backward()
            losses[step] -= loss.item()
        optimizer.step()
        worst = max(worst, abs(losses[step]))
    for name, value in (found or {}).items():
        if isinstance(value, torch.Tensor):
            worst = max(worst, float((value - reference.state_dict()[name]).abs().max()))
    return worst


# --------------------------------------------------------- gradients that backwards keep themselves


class KeepsGradient(torch.autograd.Function):
    """Sums the weight's gradient in an attribute of the weight, as Megatron does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        own = x.t() @ gradient
        before = getattr(weight, "main_grad", None)
        weight.main_grad = own if before is None else before + own
        return gradient @ weight.t(), torch.zeros_like(weight)


class Keeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, W) / 3)

    def forward(self, x):
        return torch.tanh(KeepsGradient.apply(x, self.weight))


def sgd_with_main_gradients(parameters):
    optimizer = sgd(parameters)

    def take(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "main_grad", None) is not None:
                    parameter.grad, parameter.main_grad = parameter.main_grad, None

    optimizer.register_step_pre_hook(take)
    return optimizer


def keepers():
    return nn.Sequential(*(Keeper() for _ in range(4)))


# -------------------------------------------------------------- tensors without rows between stages


class Language(nn.Module):
    """Words, and blocks that see them in another shape."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(W, 11)

    def forward(self, tokens):
        x = self.turned(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.turned_back(self.head(x), tokens)


class TimeMajor(Language):
    def turned(self, x):
        return x.transpose(0, 1)

    def turned_back(self, x, tokens):
        return x.transpose(0, 1)


class Flattened(Language):
    def turned(self, x):
        return x.flatten(0, 1)

    def turned_back(self, x, tokens):
        return x.unflatten(0, tokens.shape)


class Scaling(Layer):
    """Returns a number that later layers use, in a tensor without dimensions."""

    def forward(self, value):
        x, scale = value if isinstance(value, tuple) else (value, torch.ones(()))
        y = super().forward(x) * scale
        return y, scale + y.mean()


class Scaled(Layer):
    def forward(self, value):
        return super().forward(value[0]) * value[1]


def scaling():
    return nn.Sequential(Scaling(), Scaling(), Scaling(), Scaled())


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


# -------------------------------------------------------------------------- scripts on two ranks


class Counting(Layer):
    """Has a state that is no tensor."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state):
        self.num_calls = state["num_calls"]


def refused(make):
    try:
        make()
    except RuntimeMismatchError as error:
        return str(error)
    return ""


def begin(model, optimizer_fn=sgd):
    return lambda: Pipeline(cut_plan(LIST, [0, 2], [1, 1], 2, 4), model, F.mse_loss, optimizer_fn)


def other_values(rank):
    """Only rank 0 has loaded a file. If the pipeline loads one, that is right."""
    torch.manual_seed(1)
    model = Listed()
    if rank == 0:
        torch.manual_seed(2)
        model.load_state_dict(Listed().state_dict())
    said, folder = [], share_from_first(tempfile.mkdtemp)
    for loads in (False, True):
        pipeline = begin(copy.deepcopy(model))()
        if loads:
            pipeline.load(folder)
        else:
            pipeline.save(folder)
        said.append(refused(lambda pipeline=pipeline: pipeline.step(*rows_of(0))))
        dist.barrier()
        pipeline.close()
    assert not said[1]
    return said[0]


def other_rates(rank):
    torch.manual_seed(1)
    rate = 0.1 * (rank + 1)
    return refused(begin(Listed(), lambda params: torch.optim.SGD(params, lr=rate)))


def wrapped(rank):
    return refused(begin(nn.parallel.DistributedDataParallel(Listed())))


def stepped_twice(rank):
    """The script still has the lines of ordinary training."""
    torch.manual_seed(1)
    with begin(Listed())() as pipeline:
        pipeline.optimizer.zero_grad()
        pipeline.step(*rows_of(0))
        pipeline.optimizer.step()
        return refused(lambda: pipeline.step(*rows_of(1)))


def extra_state(rank):
    torch.manual_seed(1)
    with begin(Listed(Counting))() as pipeline:
        pipeline.step(*rows_of(0))
        found = pipeline.full_state_dict()
    if found is None:
        return {}
    return {name: value for name, value in found.items() if name.endswith("extra_state")}


def group_of_each(parameters):
    """A group for each parameter, as many scripts make them."""
    groups = [{"params": [each], "weight_decay": 0.1 * (each.ndim > 1)} for each in parameters]
    return torch.optim.SGD(groups, lr=0.1)


def watched_options(rank):
    """Ranks have other groups; what all of them have is compared all the same."""
    found = []
    for sizes in ([(2, 2), (2,)], [(2, 2), (2, 2), (2,)]):
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        if rank == len(sizes) - 2:
            optimizer = group_of_each(parameters)
    watch = OptionWatch(optimizer)
    found.append(watch.look())
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    found.append(watch.look())
    if rank == 0:
        optimizer.param_groups[0]["lr"] *= 0.5
    found.append(watch.look())
    kind = torch.optim.SGD if rank else torch.optim.Adam
    found.append(refused(lambda: OptionWatch(kind(parameters, lr=0.1))))
    found.append(refused(lambda: require_same_options(None if rank else {"a": {"lr": 0.1}})))
    return found


class Named(nn.Module):
    """Its own forward calls its layers, which the plan names one by one."""

    def __init__(self):
        super().__init__()
        for name in ("first", "second", "third", "fourth"):
            self.add_module(name, Layer())

    def forward(self, x):
        return self.fourth(self.third(self.second(self.first(x))))


class Nested(Listed):
    """Knows during its forward how deep it is."""

    depth = 0

    def forward(self, x):
        self.depth += 1
        try:
            return super().forward(x)
        finally:
            self.depth -= 1


class Centred(nn.Module):
    """A loss that remembers a mean of what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(W))

    def forward(self, output, targets):
        loss = F.mse_loss(output - self.mean, targets)
        if self.training:
            self.mean.lerp_(output.detach().mean(0), 0.1)
        return loss


def centred(rank):
    """The mean after two microbatches; rank 1 has two of the four stages."""
    torch.manual_seed(1)
    loss_fn, model = Centred(), nn.Sequential(*(Layer() for _ in range(4)))
    expected = Centred()
    with torch.no_grad():
        for inputs in rows_of(0)[0].chunk(2):
            expected(model(inputs), inputs)
    options = {"loss_weight_fn": len}
    with Pipeline(split_plan(CHAIN), model, loss_fn, sgd, **options) as pipeline:
        pipeline.step(*rows_of(0))
    return float((loss_fn.mean - expected.mean).abs().max())


def play(rank):
    chain, listed = cut_plan(CHAIN, [0, 2], [1, 1], 2, 4), cut_plan(LIST, [0, 2], [1, 1], 2, 4)
    by_row = {"data": tokens_of, "loss_fn": token_loss}
    torch.set_default_dtype(torch.float64)
    return {
        "kept": train(chain, keepers, optimizer_fn=sgd_with_main_gradients),
        "kept split": train(split_plan(CHAIN), keepers, optimizer_fn=sgd_with_main_gradients),
        "time": train(listed, TimeMajor, **by_row),
        "flat": train(listed, Flattened, **by_row),
        "scaling": train(chain, scaling),
        "scaling split": train(split_plan(CHAIN), scaling),
        "named": train(split_plan(["first", "second", "third", "fourth"]), Named),
        "nested": train(split_plan(LIST[:3] + LIST[4:]), lambda: Nested(num_blocks=2)),
        "centred": centred(rank),
        "values": other_values(rank),
        "rates": other_rates(rank),
        "wrapped": wrapped(rank),
        "twice": stepped_twice(rank),
        "extra": extra_state(rank),
        "options": watched_options(rank),
    }


EXPECTED = {
    "kept split": "parameter '0.weight': its attribute 'main_grad' is not what the whole model",
    "values": "model: its 'embed.weight' has other values on rank 1 than on rank 0",
    "rates": "for parameter 'embed.weight', lr is 0.2 on rank 1, but 0.1 on rank 0",
    "wrapped": "model: is a DistributedDataParallel, which talks to all ranks by itself",
    "twice": "optimizer: its step was called outside of the pipeline",
}


def test_scripts_of_two_ranks():
    all_found = run_ranks(2, play)
    for found in all_found:
        for name in ("kept", "time", "flat", "scaling", "scaling split", "named", "nested"):
            assert isinstance(found[name], float), (name, found[name])
            assert found[name] < 1e-9, name
        for name, text in EXPECTED.items():
            assert text in found[name], (name, found[name])
            assert "\n" not in found[name]
        *_, kinds, unknown = found["options"]
        assert "returns SGD on rank 1, but Adam on rank 0" in kinds
        assert not unknown
    assert all_found[1]["centred"] < 1e-9
    # Two microbatches, and one of each when the pipeline was verified is put back.
    counts = {f"blocks.{i}._extra_state": {"num_calls": 2} for i in range(3)}
    assert all_found[0]["extra"] == counts
    first, second = (found["options"] for found in all_found)
    assert first[:2] == second[:2]
    assert first[0] != first[1]
    assert first[2] != second[2]


def divide(rank):
    plans = [cut_plan(LIST, [0, 2], replicas, 2, 4) for replicas in ([1, 2], [2, 1])]
    return [train(plan, TimeMajor, tokens_of, token_loss, steps=1) for plan in plans]


def test_replicas_divide_rows_only():
    for found in run_ranks(3, divide):
        for text in found:
            assert "by dimension 0, so that has to be the rows" in text


class CountsWords(Language):
    """The gradient of a word is divided by how often the microbatch has it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, W, scale_grad_by_freq=True)

    def turned(self, x):
        return x

    def turned_back(self, x, tokens):
        return x


def count_words(rank):
    torch.manual_seed(1)
    plan = cut_plan(LIST, [0, 2], [2, 1], 2, 4)
    with Pipeline(plan, CountsWords(), token_loss, sgd) as pipeline:
        pipeline.step(*tokens_of(0))


def test_replicas_say_that_rows_meet_in_a_gradient(capfd):
    """Their gradients of all runs lie in the same memory."""
    run_ranks(3, count_words)
    said = capfd.readouterr().err
    assert "rows influence each other in the model: the gradient of 'embed.weight'" in said


# ------------------------------------------------------------------------------- in one process


def test_a_message_brings_any_shape_where_nothing_is_divided():
    tensors = [torch.randn(()), torch.randn(4, 2), torch.randn(3, 4, 2), torch.randn(0, 2)]
    contents = describe(tensors, [True] * 4, ["tensor", 0], 4, 0, is_divided=False)
    assert [kind.has_rows for kind in contents.kinds] == [False, True, False, False]
    assert [kind.shape_for(4) for kind in contents.kinds] == [tuple(t.shape) for t in tensors]
    packing = find_packing(contents, 4)
    buffer = packing.pack(tensors, packing.header)
    for sent, found in zip(tensors, packing.unpack(buffer), strict=True):
        assert torch.equal(sent, found)
    others = describe([torch.randn(4)], [True], ["tensor", 0], 4, 0, is_divided=False)
    row = describe([torch.randn(2, 4)], [True], ["tensor", 0], 2, 0)
    assert not row.has_layout_of(others)


def test_modules_that_talk_to_other_ranks_are_refused():
    with pytest.raises(RuntimeMismatchError, match="its '1' is a SyncBatchNorm, which talks"):
        require_whole(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    require_whole(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("kind", ["list", "chain"])
def test_a_cut_model_that_somebody_else_calls_says_so(kind, start):
    model, names = Listed(), LIST
    if kind == "chain":
        model, names = nn.Sequential(*(Layer() for _ in range(4))), CHAIN
    cut(model, lay_out(model, names), range(start, start + 2))
    with pytest.raises(RuntimeMismatchError, match=r"can only be run by the pipeline; call"):
        model(torch.randn(2, W))
    layer = model[start] if kind == "chain" else model.blocks[start]
    assert layer(torch.randn(2, W)).shape == (2, W)  # its own layers are whole


class Mixing(torch.optim.SGD):
    """Steps by a norm over all parameters."""

    def step(self, closure=None):
        found = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(found, 0.1)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Mixing])
def test_an_optimizer_may_have_a_group_for_each_parameter(kind):
    """The options of the groups differ; that is no mixing."""

    def make(parameters):
        groups = [{"params": [each], "lr": 0.01 * (1 + each.ndim)} for each in parameters]
        return kind(groups)

    optimizer = make([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    assert OptimizerTrials(make).find_mixing(optimizer) == (kind is Mixing)


class Wrapper(torch.optim.Optimizer):
    """Leaves out what torch's own class sets up, as many published wrappers do."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_may_wrap_another_one():
    parameter = nn.Parameter(torch.ones(2))
    same_model = SameModel(None, Wrapper(sgd([parameter])))
    same_model.require()
    own = sgd([parameter])
    same_model = SameModel(None, own)
    own.step()
    same_model.end_step()
    same_model.require()
    own.step()
    with pytest.raises(RuntimeMismatchError, match="its step was called outside"):
        same_model.require()


class Paired(Layer):
    """Gets and returns a container."""

    def forward(self, pair):
        return {"x": super().forward(pair["x"]), "mask": pair["mask"]}


class InPairs(Listed):
    def __init__(self):
        super().__init__(Paired)

    def forward(self, x):
        pair = {"x": self.embed(x), "mask": x > 0}
        for block in self.blocks:
            pair = block(pair)
        return self.head(pair["x"] * pair["mask"])


class Energy(Layer):
    """Its output is a gradient, which the forward computes by itself."""

    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = super().forward(y).sum()
            (slope,) = torch.autograd.grad(energy, y, create_graph=True)
        return x - slope


class Sparse(Layer):
    def forward(self, x):
        return super().forward(x.to_dense()).to_sparse()


MODELS = {
    "pairs": (InPairs, ""),
    "energy": (lambda: Listed(Energy), ""),
    "sparse": (lambda: Listed(Sparse), "a sparse or nested tensor cannot cross a cut"),
}


@pytest.mark.parametrize("cuts", [[0, 1], [0, 2], [0, 1, 3]])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_strangers(name, cuts):
    make, expected = MODELS[name]

    def subject():
        torch.manual_seed(4)
        return Subject(make(), F.mse_loss, *rows_of(0))

    found = find_refusal(subject, LIST, cuts) or ""
    if not expected:
        assert not found
    elif cuts != [0, 1]:  # the embedding is dense
        assert expected in found
