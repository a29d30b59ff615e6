"""Each private name of torch that pipeplan uses still means what it meant; by name."""

import ast
import copy
import re
from datetime import timedelta
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import pipeplan  # noqa: E402
from pipeplan.splitting import torch_private  # noqa: E402

SOURCE = Path(pipeplan.__file__).parent
PRIVATE = re.compile(
    r"\.(_version|_parameters|_buffers|_modules|_get_default_store|_NormBase|_Loss|_C|_dynamo"
    r"|_forward_hooks|_forward_pre_hooks|_backward_hooks|_non_persistent_buffers_set)\b"
)


def test_this_torch_was_tested():
    assert torch.__version__.partition("+")[0] in torch_private.TESTED_VERSIONS


def test_count_changes():
    tensor = torch.zeros(2)
    before = torch_private.count_changes(tensor)
    tensor.add_(1)
    assert torch_private.count_changes(tensor) == before + 1
    assert torch_private.count_changes(tensor.view(2, 1)) == before + 1


def test_default_store(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = torch_private.default_store()
        found.set("key", "value")
        assert found.clone().get("key") == b"value"
        assert dist.PrefixStore("prefix", found).num_keys() >= 1
    finally:
        dist.destroy_process_group()


def test_torch_dispatch_mode_sees_operations_of_autograd_too():
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        torch.tanh(x).sum().backward()
    assert {"aten.tanh.default", "aten.tanh_backward.default"} <= set(seen)


def test_quick_dispatch_mode_is_not_compiled():
    """A compiled layer runs as it is inside of the mode, and the mode sees its operations."""
    seen, graphs = [], []

    class Watch(torch_private.QuickDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Layer(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.softplus(torch.tanh(x))

    layer = Layer()
    layer.compile(backend=backend)
    x = torch.ones(2)
    with Watch():
        layer(x)
    assert seen == ["aten.tanh.default", "aten.softplus.default"]
    assert not graphs
    with Watch():
        layer(torch.ones(3, requires_grad=True)).sum().backward()
    assert "aten.tanh_backward.default" in seen
    assert not graphs
    layer(torch.ones(2))
    assert len(graphs) == 1


def test_words_of_broken_connections():
    with pytest.raises((RuntimeError, OSError)) as caught:
        dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=200))
    text = str(caught.value).lower()
    assert isinstance(caught.value, dist.DistError) or any(
        word in text for word in torch_private.CONNECTION_WORDS
    )


def test_torch_logs_nothing_where_nothing_is_wanted(capfd):
    """Each attempt to connect to a port without a store is a warning, with a stack trace."""

    def fail_to_connect():
        with pytest.raises(dist.DistError):
            dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=200))
        return [
            line for line in capfd.readouterr().err.splitlines() if line.startswith(("[W", "[E"))
        ]

    assert fail_to_connect()
    with torch_private.without_torch_log():
        with torch_private.without_torch_log():
            pass
        assert not fail_to_connect()
    assert fail_to_connect()


def private_names(path):
    """Private names of torch in a file: imports of private modules, private attributes."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_")]
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(f".{node.attr}"):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not is_own:  # `self._parameters` of our own classes is ours
                found.append(node.attr)
    return found


@pytest.mark.parametrize("room", ["splitting", "runtime", "measure"])
def test_private_names_stand_in_one_module(room):
    found = {
        str(path.relative_to(SOURCE)): private_names(path)
        for path in sorted((SOURCE / room).rglob("*.py"))
        if path.name != "torch_private.py"
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_gradient_hooks():
    weight = torch.nn.Parameter(torch.ones(2))
    assert torch_private.gradient_hooks(weight) == ([], [])
    assert torch_private.count_hooks(weight) == 0
    weight.register_hook(abs)
    weight.register_post_accumulate_grad_hook(print)
    assert torch_private.gradient_hooks(weight) == ([abs], [print])
    assert torch_private.count_hooks(weight) == 2


def test_make_wrapper():
    seen = []

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return torch.zeros(1)

    like = torch.empty(2, 3, device="meta").T
    made = torch_private.make_wrapper(Wrapped, like, torch.device("cpu"))
    assert (made.shape, made.stride(), made.device.type) == ((3, 2), (1, 3), "cpu")
    torch.neg(made)
    assert seen == ["aten.neg.default"]


def test_storages_by_number():
    tensor = torch.zeros(4)
    assert torch_private.storage_key(tensor) == torch_private.storage_key(tensor[1:])
    assert torch_private.storage_key(tensor) != torch_private.storage_key(tensor.clone())
    with torch_private.FakeTensorMode():
        fake = torch.zeros(10**15)
        assert torch_private.storage_key(fake) == torch_private.storage_key(fake[1:])
        assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(tensor)


def test_views():
    assert torch_private.makes_views(torch.ops.aten.transpose.int)
    assert not torch_private.makes_views(torch.ops.aten.add_.Tensor)
    assert not torch_private.makes_views(torch.ops.aten.mm.default)


def test_nodes_that_save_tensors():
    leaf = torch.ones(2, requires_grad=True)
    assert torch_private.saves_tensors(torch.nn.functional.gelu(leaf).grad_fn)
    assert not torch_private.saves_tensors((leaf + leaf).grad_fn)
    assert not torch_private.saves_tensors(leaf.view(1, 2).grad_fn)


def test_flops():
    left, right = torch.ones(2, 3), torch.ones(3, 4)
    multiply = torch.ops.aten.mm.default
    assert torch_private.count_flops(multiply, (left, right), {}, left @ right) == 2 * 2 * 3 * 4
    negate = torch.ops.aten.neg.default
    assert torch_private.count_flops(negate, (left,), {}, -left) is None


def test_fake_copies_and_missing_values():
    layer = torch.nn.Linear(2, 2)
    mode = torch_private.FakeTensorMode()
    with torch_private.FakeCopyMode(mode):
        copied = copy.deepcopy(layer)
    assert torch_private.is_fake(copied.weight)
    assert isinstance(copied.weight, torch.nn.Parameter)
    assert not torch_private.is_fake(layer.weight)
    with torch_private.without_fake_log(), pytest.raises(RuntimeError) as raised, mode:
        torch.ones(2).sum().item()
    assert torch_private.is_about_values(raised.value)
    assert not torch_private.is_about_values(RuntimeError())


def test_tables_of_a_modules_hooks():
    module = torch.nn.Linear(2, 2)
    tables = torch_private.call_hooks(module)
    assert sum(map(len, tables)) == 0
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert [len(table) for table in tables] == [1, 1, 1, 1]


def test_run_backward(monkeypatch):
    """As torch's own, which looks at everything that is not plain and alike."""
    asked, backward = [], torch.autograd.backward
    monkeypatch.setattr(
        torch.autograd, "backward", lambda *given: (asked.append(len(given[0])), backward(*given))
    )
    weight = torch.nn.Parameter(torch.full((3,), 2.0))
    first, second = weight * 2, (weight**2).sum()
    torch_private.run_backward([first, second], [torch.ones(3), torch.tensor(0.5)])
    assert weight.grad.tolist() == [2.0 + 0.5 * 4.0] * 3
    assert asked == [], "the quick way"
    with pytest.raises(RuntimeError, match="second time"):  # the graph is freed
        torch_private.run_backward([second], [torch.tensor(0.5)])
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch_private.run_backward([weight * 2], [torch.ones(2)])
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch_private.run_backward([weight * 2], [torch.ones(1, 3)])
    edge = torch.autograd.graph.get_gradient_edge(weight * 3)
    torch_private.run_backward([edge], [torch.ones(3)])
    assert weight.grad.tolist() == [7.0] * 3
    half = (weight * 1).half()
    torch_private.run_backward([half], [torch.ones(3)])
    assert weight.grad.tolist() == [8.0] * 3
    assert asked == [1] * 4
