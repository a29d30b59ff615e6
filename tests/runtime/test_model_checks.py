"""What a pipeline refuses before it begins: models, hooks, optimizers, batches and losses."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from pipeplan.errors import RuntimeMismatchError  # noqa: E402
from pipeplan.runtime.batches import Whole, mark_rows, num_rows  # noqa: E402
from pipeplan.runtime.loss_terms import LossTerms  # noqa: E402
from pipeplan.runtime.model_checks import (  # noqa: E402
    require_dense_gradients,
    require_linear_hooks,
    require_separate_memory,
    require_whole,
)
from pipeplan.runtime.optimizers import (  # noqa: E402
    find_options,
    make_separate_optimizer,
    make_trials,
    plan_groups,
    require_no_mixing,
)
from pipeplan.runtime.scaling import LossScaler, make_scaler  # noqa: E402
from pipeplan.runtime.step_checks import SameModel, require_no_autocast  # noqa: E402
from pipeplan.runtime.updating import Updater  # noqa: E402
from pipeplan.runtime.verification.loss_rows import LossOfRows, spread_rows  # noqa: E402
from pipeplan.splitting import cut, lay_out  # noqa: E402
from runtime.samples import TinyLanguageModel  # noqa: E402

CPU = torch.device("cpu")


def three():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


# ------------------------------------------------------------------ models


def share_values(model):
    model[2].weight = nn.Parameter(model[0].weight.data)


def share_transposed(model):
    model[2].weight = nn.Parameter(model[0].weight.data.t())


def share_one_row(model):
    model[2].bias = nn.Parameter(model[0].weight.data[3])


def share_with_buffer(model):
    model[2].register_buffer("copy", model[0].weight.data)


def share_with_attribute(model):
    model[1].seen = model[0].bias.detach()


SHARED = [share_values, share_transposed, share_one_row, share_with_buffer, share_with_attribute]


@pytest.mark.parametrize("share", SHARED)
def test_tensors_of_two_stages_in_one_memory_are_refused(share):
    model = three()
    layout = lay_out(model)
    require_separate_memory(model, layout, [range(1), range(1, 3)])
    share(model)
    with pytest.raises(RuntimeMismatchError, match="are different tensors in the same memory"):
        require_separate_memory(model, layout, [range(1), range(1, 3)])
    require_separate_memory(model, layout, [range(3)])  # one stage holds both


def test_tied_weights_and_parts_of_one_memory_are_no_problem():
    model = three()
    model[2].weight = model[0].weight
    flat = torch.randn(8)
    model[0].bias, model[2].bias = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    require_separate_memory(model, lay_out(model), [range(1), range(1, 3)])


def test_a_model_is_cut_once():
    for model in (three(), TinyLanguageModel()):
        require_whole(model)
        cut(model, lay_out(model), range(1))
        with pytest.raises(RuntimeMismatchError, match="another Pipeline has cut it"):
            require_whole(model)


def test_sparse_gradients_are_refused():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(RuntimeMismatchError, match=r"'0' has sparse gradients.*sparse=False"):
        require_dense_gradients(model)


@pytest.mark.parametrize("hook", [lambda g: 0.5 * g, lambda g: None, lambda g: g.flip(0)])
def test_linear_hooks_are_let_through(hook):
    model = three()
    model[0].weight.register_hook(hook)
    require_linear_hooks(model)


@pytest.mark.parametrize(
    "hook", [lambda g: g.clamp(-0.1, 0.1), lambda g: g / g.norm(), lambda g: g + 1, torch.sign]
)
def test_hooks_that_need_the_whole_gradient_are_refused(hook):
    model = three()
    model[2].weight.register_hook(hook)
    with pytest.raises(RuntimeMismatchError, match=r"'2.weight': has a hook that needs its whole"):
        require_linear_hooks(model)


def test_optimizers_in_the_backward_are_refused():
    model = three()
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(RuntimeMismatchError, match=r"'0.bias': has a hook"):
        require_linear_hooks(model)


class _StageOf:
    """A replica, as far as the check before a step looks at it."""

    def __init__(self, module):
        self.parts = [SimpleNamespace(module=module)]


def idle():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_parameters_that_an_optimizer_gets_later_are_refused():
    optimizer = idle()
    same_model = SameModel(None, optimizer)
    same_model.require()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeMismatchError, match="has got other parameters since"):
        same_model.require()


def test_a_layer_that_is_replaced_later_is_refused():
    model = three()
    stage = _StageOf(cut(model, lay_out(model), range(2)))
    same_model = SameModel(stage, idle())
    same_model.require()
    model[0] = nn.Linear(4, 4)
    with pytest.raises(RuntimeMismatchError, match="its layer '0' was replaced"):
        same_model.require()


def test_a_hook_that_comes_later_is_refused():
    model = three()
    same_model = SameModel(_StageOf(cut(model, lay_out(model), range(2))), idle())
    hook = model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(RuntimeMismatchError, match=r"0\.weight: got a hook after"):
        same_model.require()
    hook.remove()
    same_model.require()


def test_nothing_is_trained_in_inference_mode():
    with torch.inference_mode(), pytest.raises(RuntimeMismatchError, match="inference_mode"):
        SameModel(None, idle()).require()


def test_a_step_inside_of_autocast_is_refused():
    device = torch.device("cpu")
    require_no_autocast(device)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeMismatchError, match=r"inside of torch.autocast.*give amp_dtype"),
    ):
        require_no_autocast(device)


# ------------------------------------------------------------------ optimizers


class OneNorm(torch.optim.Optimizer):
    """Divides by the norm of all its gradients."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.history = []

    @torch.no_grad()
    def step(self, closure=None):
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum(p.grad.square().sum() for p in found))
        self.history.append(norm)
        for parameter in found:
            parameter -= 0.1 * parameter.grad / norm


class Noisy(torch.optim.SGD):
    """Adds noise to each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter += 0.01 * torch.randn_like(parameter)


BY_THEMSELVES = [
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "Adafactor"),
    *("RMSprop", "Rprop", "ASGD"),
]


def take_stage(optimizer_fn, *, is_apart=True, groups_fn=None):
    """The optimizer of the last layer of a model, as that layer's rank makes it."""
    model = three()
    before = [p.detach().clone() for p in model.parameters()]
    groups = plan_groups(model, None, groups_fn)
    expected = find_options(model, None, optimizer_fn, groups)
    own = {name: p for name, p in model.named_parameters() if name.startswith("2")}
    trials = make_trials(optimizer_fn, groups) if is_apart else None
    optimizer = make_separate_optimizer(optimizer_fn, own, groups, expected, trials)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    return optimizer


def train_small(optimizer, num_steps):
    """Let an optimizer step with gradients of one."""
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_optimizers_of_torch_update_each_parameter_by_itself(name):
    kind = getattr(torch.optim, name)
    optimizer = take_stage(kind)
    train_small(optimizer, 5)
    require_no_mixing(make_trials(kind, None), optimizer)


def test_optimizers_that_mix_parameters_are_refused():
    with pytest.raises(RuntimeMismatchError, match=r"OneNorm updates a parameter by what other"):
        take_stage(OneNorm)
    assert take_stage(OneNorm, is_apart=False).history == []
    take_stage(lambda found: Noisy(found, lr=0.1))


class LateNorm(OneNorm):
    """Does so behind a warm-up, which it counts itself."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps > 20:
            super().step()


class OneStepSize(torch.optim.Optimizer):
    """Finds one step size for all parameters, as D-adaptation does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})
        self.size = 1e-6

    @torch.no_grad()
    def step(self, closure=None):
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(p.grad.abs().sum()) for p in found)
        for parameter in found:
            parameter -= self.size * parameter.grad.sign()
        self.size = max(self.size, 1e-6 * total)


def test_optimizers_with_one_step_size_are_refused_however_small_it_is():
    with pytest.raises(
        RuntimeMismatchError, match=r"OneStepSize updates a parameter by what other"
    ):
        take_stage(OneStepSize)
    with pytest.raises(RuntimeMismatchError, match=r"SGD updates a parameter by what other"):
        take_stage(lambda found: with_hook(found, lr=1e-7))


def test_optimizers_that_mix_parameters_later_are_refused_then():
    trials = make_trials(LateNorm, None)
    optimizer = take_stage(LateNorm)
    train_small(optimizer, 4)
    require_no_mixing(trials, optimizer)
    train_small(optimizer, 12)
    with pytest.raises(RuntimeMismatchError, match=r"LateNorm updates a parameter by what other"):
        require_no_mixing(trials, optimizer)


def test_a_hook_of_the_optimizer_that_comes_later_is_refused():
    optimizer = idle()
    same_model = SameModel(None, optimizer)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeMismatchError, match="optimizer: got a hook in front of its step"):
        same_model.require()
    hook.remove()
    same_model.require()


def clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.01)


def with_hook(found, lr=0.1):
    optimizer = torch.optim.SGD(found, lr=lr)
    held = optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: clip(held))
    return optimizer


def with_another_step(found):
    optimizer = torch.optim.SGD(found, lr=0.1)
    held, step = optimizer.param_groups[0]["params"], optimizer.step
    optimizer.step = lambda closure=None: (clip(held), step())
    return optimizer


@pytest.mark.parametrize("optimizer_fn", [with_hook, with_another_step])
def test_clipping_around_the_step_is_refused(optimizer_fn):
    with pytest.raises(RuntimeMismatchError, match=r"SGD updates a parameter by what other"):
        take_stage(optimizer_fn)
    take_stage(optimizer_fn, is_apart=False)


BY_POSITION = {
    "gives it lr=0.5 on this rank and 0.1 there": lambda ps: torch.optim.SGD(
        [{"params": ps[:1], "lr": 0.5}, {"params": ps[1:], "lr": 0.1}]
    ),
    "gives it lr=": lambda ps: torch.optim.SGD(ps, lr=10 / sum(p.numel() for p in ps)),
    "leaves it out on this rank only": lambda ps: torch.optim.SGD(
        [{"params": []}, {"params": ps if len(ps) > 2 else []}], lr=0.1
    ),
}


@pytest.mark.parametrize("problem", BY_POSITION)
def test_optimizers_that_count_their_parameters_are_refused(problem):
    with pytest.raises(RuntimeMismatchError, match=f"parameter '2.*{problem}.*param_groups_fn"):
        take_stage(BY_POSITION[problem])


def test_a_kept_optimizer_is_the_real_one():
    kept = []

    def optimizer_fn(groups):
        kept[:] = [torch.optim.AdamW(groups, lr=0.1)]
        return kept[0]

    found = take_stage(optimizer_fn, groups_fn=lambda n, p: {"weight_decay": float(p.ndim > 1)})
    assert found is kept[0]
    assert [group["weight_decay"] for group in found.param_groups] == [1.0, 0.0]


def test_optimizers_that_need_a_closure_are_refused():
    with pytest.raises(RuntimeMismatchError, match=r"LBFGS.step needs 'closure'"):
        take_stage(torch.optim.LBFGS, is_apart=False)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_kept_stay_as_they_are(set_to_none):
    model = three()
    model(torch.ones(2, 4)).sum().backward()
    updater = Updater(clip_norm=None, scaler=LossScaler(enabled=False), on_nan="report")
    updater.parameters = list(model.parameters())
    updater._kept = updater._mark_gradients()
    assert updater.gradient_scale(1.0) == 1.0
    model.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeMismatchError, match="gradients: were cleared or changed"):
        updater.gradient_scale(1.0)


def test_complex_gradients_have_a_norm():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    weight.grad = torch.tensor([3 + 4j])
    updater = Updater(clip_norm=1.0, scaler=LossScaler(enabled=False), on_nan="report")
    updater.norm_parameters = [weight]
    assert float(updater._sum_squares(torch.zeros(1, dtype=torch.float64))) == 25.0


# ------------------------------------------------------------------ batches

ROWS = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"x": ROWS, "y": ROWS.to_sparse()}, r"batch\['y'\]: is a sparse or nested tensor"),
        (ROWS.to_sparse(), "batch: is a sparse or nested tensor"),
        ((ROWS, ROWS.clone().requires_grad_()), r"batch\[1\]: needs a gradient"),
        (ROWS * nn.Parameter(torch.ones(3)), "batch: needs a gradient"),
        ({"x": ROWS[:0]}, "batch: has no rows"),
    ],
)
def test_batches_are_data(batch, problem):
    with pytest.raises(RuntimeMismatchError, match=problem):
        num_rows(batch, "batch")


def test_targets_are_data():
    assert mark_rows((ROWS, Whole(3)), 4, "targets")[0] is ROWS
    with pytest.raises(RuntimeMismatchError, match="targets: needs a gradient"):
        mark_rows(ROWS.clone().requires_grad_(), 4, "targets")


# ------------------------------------------------------------------ losses


def cross_entropy(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def find_problem(loss_fn, output, targets, weight_fn=None):
    loss = LossTerms(loss_fn=loss_fn, metrics={}, weight_fn=weight_fn)
    rows = LossOfRows.of(loss, output, len(output), CPU, None)
    return rows.find_problem(targets, len(targets))


def make_targets(num_padded):
    targets = torch.randint(7, (16, 5), generator=torch.Generator().manual_seed(0))
    targets[12:, 5 - num_padded :] = -100
    return targets


OUTPUT = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(1))


def count(targets):
    return (targets != -100).sum()


@pytest.mark.parametrize("num_padded", [1, 4, 5])
def test_ignored_targets_of_a_few_rows_need_weights(num_padded):
    assert find_problem(cross_entropy, OUTPUT, make_targets(0)) is None
    problem = find_problem(cross_entropy, OUTPUT, make_targets(num_padded))
    assert "loss_fn: is no mean over rows" in problem
    assert "give loss_weight_fn" in problem
    assert find_problem(cross_entropy, OUTPUT, make_targets(num_padded), count) is None


def contrastive(output, targets):
    flat = 0.1 * output.flatten(1)
    return F.cross_entropy(flat @ flat.T, torch.arange(len(flat)))


def standardised(output, targets):
    return ((output - output.mean(0)) / (output.std(0) + 1)).square().mean()


def test_losses_that_compare_rows_are_refused_unless_weights_say_so():
    for loss_fn in (contrastive, standardised):
        assert "is no mean over rows" in find_problem(loss_fn, OUTPUT, make_targets(0))
        assert find_problem(loss_fn, OUTPUT, make_targets(0), len) is None


def test_sums_are_refused_even_with_weights():
    def summed(output, targets):
        return cross_entropy(output, targets) * len(targets)

    assert "is a sum over rows" in find_problem(summed, OUTPUT, make_targets(0))
    assert "is a sum over rows" in find_problem(summed, OUTPUT, make_targets(0), len)


def test_losses_of_which_nothing_can_be_said():
    def dropping(output, targets):
        return cross_entropy(F.dropout(output), targets)

    assert find_problem(dropping, OUTPUT, make_targets(0)) is None
    assert find_problem(cross_entropy, OUTPUT[:, :3], make_targets(0)) is None  # other lengths
    loss = LossTerms(loss_fn=cross_entropy, metrics={}, weight_fn=None)
    assert LossOfRows.of(loss, {"loss": torch.tensor(1.0)}, 4, CPU, None) is None


def test_asking_changes_no_loss_module():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(5), 0

        def forward(self, output, targets):
            self.calls += 1
            return cross_entropy(self.norm(output), targets)

    loss = Counts()
    find_problem(loss, OUTPUT, make_targets(0))
    assert loss.calls == 0
    assert loss.norm.num_batches_tracked == 0


def test_rows_are_spread_over_the_batch():
    assert spread_rows(1) == [0]
    assert spread_rows(5) == [0, 1, 2, 3, 4]
    assert spread_rows(100, 4) == [0, 33, 66, 99]
    for rows in range(1, 40):
        assert len(set(spread_rows(rows))) == min(rows, 8)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3.0, "returned a float"),
        (None, "returned a NoneType"),
        ((torch.tensor(1.0), 2), "returned a tuple"),
        (torch.ones(4), r"a tensor of shape \(4,\)"),
        (torch.tensor(1), "type torch.int64"),
        (torch.tensor(1j), "type torch.complex64"),
    ],
)
def test_a_loss_is_one_number(value, problem):
    terms = LossTerms(loss_fn=lambda output, targets: value, metrics={}, weight_fn=None)
    with pytest.raises(RuntimeMismatchError, match=f"loss_fn: {problem}|loss_fn:.*{problem}"):
        terms.of(OUTPUT, None, 1.0, torch.no_grad())


def test_a_loss_of_one_element_is_a_number():
    terms = LossTerms(
        loss_fn=lambda output, _: output.mean().view(1, 1), metrics={}, weight_fn=None
    )
    assert terms.of(OUTPUT, None, 1.0, torch.no_grad()).shape == ()


def test_the_program_does_not_step_the_optimizer():
    """Gradients are still there behind a step, so a loop that steps, too, would update twice."""
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updater = Updater(clip_norm=None, scaler=LossScaler(enabled=False), on_nan="report")
    updater.take_up(optimizer, None)
    model(torch.ones(2, 4)).sum().backward()
    before = model[2].bias.detach().clone()
    with pytest.raises(RuntimeMismatchError, match=r"step\(\) was called outside of pipeline.step"):
        optimizer.step()
    assert torch.equal(model[2].bias, before)
    updater._step()
    assert not torch.equal(model[2].bias, before)


def test_the_name_of_a_type_is_no_type():
    with pytest.raises(RuntimeMismatchError, match=r"amp_dtype: 'bfloat16' .* use torch\.bfloat16"):
        make_scaler("bfloat16")
    assert make_scaler(torch.float16).enabled
    assert not make_scaler(None).enabled
