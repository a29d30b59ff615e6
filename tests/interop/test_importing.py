"""Files of other programs become models and clusters with exactly their totals, or are refused."""

import gzip
import json
import random
from decimal import Decimal

import pytest

from command_line import run_command
from interop.foreign_files import (
    DAPPLE,
    LAYERS_CSV,
    MATRIX_CSV,
    NCCL,
    NCCL_SWITCHED,
    NVIDIA_TOPO,
    PIPEDREAM,
    PIPER,
    PIPER_COSTS,
    SAMPLES,
    TRACE,
    trace,
)
from pipeplan.cluster import Cluster
from pipeplan.documents.files import read_cluster, read_model
from pipeplan.errors import InputError
from pipeplan.interop.dags import Edge, Node, chain_of
from pipeplan.interop.imported import ImportSettings
from pipeplan.interop.importing import READERS, import_text, recognise
from pipeplan.interop.source_text import read_text

MANY_GPUS = "".join(["<system>", *(f'<gpu dev="{n}" sm="80"/>' for n in range(513)), "</system>"])
CLUSTERS = {"nvidia-topo", "nccl", "matrix-csv"}


def imported(text: str, source_format: str | None = None, **settings):
    return import_text(text, ImportSettings(name="it", **settings), source_format)


def total(layers, field: str) -> Decimal:
    """The exact sum of the numbers as they are written."""
    return sum((Decimal(repr(getattr(layer, field))) for layer in layers), Decimal(0))


@pytest.mark.parametrize("source_format", SAMPLES)
def test_formats_are_recognised(source_format):
    found = recognise(SAMPLES[source_format])
    assert found == {"dapple": "pipedream"}.get(source_format, source_format)
    result = imported(SAMPLES[source_format]).result
    assert isinstance(result, Cluster) == (source_format in CLUSTERS)
    assert result == imported(SAMPLES[source_format], source_format).result


def test_there_is_a_sample_of_every_format():
    assert READERS.keys() == SAMPLES.keys()


# ------------------------------------------------------------------------------- models


def test_pipedream_totals_are_exact():
    model = imported(PIPEDREAM, microbatch_size=64).result
    assert model.microbatch_size == 64
    assert total(model.layers, "forward_ms") == Decimal("5.066")  # without Input1's 3.4
    assert total(model.layers, "backward_ms") == Decimal("15.373")
    assert total(model.layers, "parameter_bytes") == 132382720 + 2 * 33587200
    sizes = 3 * 6291456 + 64 + 2 * (6291456 + 2 * 131072)
    assert total(model.layers, "activation_bytes") == sizes


def test_pipedream_graphs_become_chains():
    """File order where it can be: node1, 4, then node2 since node5 needs it, 5, 6, 7, 8."""
    layers = imported(PIPEDREAM).result.layers
    assert [layer.name for layer in layers] == [
        "Input0",
        "Embedding(320, 16, padding_idx=0)",
        "Input1",
        "LSTM(16, 16)",
        "__getitem__(0)",
        "LSTM(16, 16)#2",
        "Add",
    ]
    lstm, tensor = 6291456 + 2 * 131072, 6291456
    assert [layer.output_bytes for layer in layers] == [
        0,  # Input0 has no bytes
        tensor,  # the embedding, for node5 and node8
        tensor + 64,  # and Input1
        tensor + lstm,
        tensor + tensor,  # the embedding and node6, each once though node6 has two readers
        tensor + tensor + lstm,
        0,
    ]


def test_input_nodes_cost_nothing_and_somebody_is_told():
    notes = imported(PIPEDREAM).notes
    assert any("'node2'" in note and "'node1'" not in note for note in notes)
    assert any("--microbatch-size" in note for note in notes)
    assert not any("--microbatch-size" in n for n in imported(PIPEDREAM, microbatch_size=2).notes)


def test_a_node_called_input_with_a_source_is_no_input():
    text = PIPEDREAM.replace("-- Add --", "-- Input7 --")
    assert imported(text).result.layers[-1].forward_ms == 0.01


def test_dapple_totals_are_exact():
    layers = imported(DAPPLE, "dapple").result.layers
    assert total(layers, "forward_ms") == Decimal("3.85")
    assert total(layers, "backward_ms") == Decimal("7.7")
    assert total(layers, "parameter_bytes") == 6835 + 392015625
    assert [layer.output_bytes for layer in layers] == [602112 + 4004, 384e6, 0]


def test_piper_totals_are_exact():
    layers = imported(PIPER).result.layers
    seconds = sum((Decimal(repr(costs[1])) for costs in PIPER_COSTS), Decimal(0))
    assert total(layers, "forward_ms") + total(layers, "backward_ms") == 1000 * seconds
    assert (layers[1].forward_ms, layers[1].backward_ms) == (0.372, 0.744)
    assert total(layers, "parameter_bytes") == sum(int(costs[2]) for costs in PIPER_COSTS)
    assert total(layers, "activation_bytes") == sum(int(costs[3]) for costs in PIPER_COSTS)


def test_piper_edges_of_one_producer_count_once_with_the_largest():
    layers = imported(PIPER).result.layers
    assert [layer.output_bytes for layer in layers] == [
        8192,
        31457280,
        31457280 + 8192,  # the edges of 12 have 8192 and 4096 bytes
        31457280 + 4096,  # only the smaller one is left
        0,
    ]


def test_csv_of_layers():
    layers = imported(LAYERS_CSV).result.layers
    assert [layer.name for layer in layers] == ["embed", "block, first", "head"]
    assert [layer.activation_bytes for layer in layers] == [8388608, 4194304, 1]
    assert total(layers, "forward_ms") == Decimal("2.35")


def test_traces_give_times_and_bytes():
    a, b = imported(TRACE).result.layers
    assert (a.name, b.name) == ("a", "b")
    assert (a.forward_ms, b.forward_ms) == pytest.approx((0.045, 0.07))
    assert (a.backward_ms, b.backward_ms) == pytest.approx((0.082, 0.142))
    assert (a.parameter_bytes, b.parameter_bytes) == (8 * 3 * 4, 10 * 8 * 4)
    assert (a.output_bytes, b.output_bytes) == (4 * 8 * 4, 0)


def test_traces_with_kernels_count_the_kernels():
    document = trace()
    for index, event in enumerate(document["traceEvents"]):
        event["args"]["External id"] = index
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5000.0, "dur": 7.0}
        | {"args": {"External id": index}}
        for index, event in enumerate(document["traceEvents"])
        if event["name"] == "aten::addmm" or event["name"] == "AddmmBackward0"
    ]
    document["traceEvents"] += kernels
    a, b = imported(json.dumps(document)).result.layers
    assert (a.forward_ms, b.forward_ms) == pytest.approx((0.007, 0.0))
    assert (a.backward_ms, b.backward_ms) == pytest.approx((0.007, 0.007))


def test_a_real_trace_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
        for _ in range(3)
    ]
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Sequential(*blocks))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, with_stack=True, with_modules=True, record_shapes=True
    ) as profiler:
        for _ in range(2):
            model(torch.randn(5, 4)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    layers = imported((tmp_path / "trace.json").read_text()).result.layers
    assert len(layers) == 4
    assert [layer.output_bytes for layer in layers] == [5 * 16 * 4] * 3 + [0]
    each = [sum(p.numel() * 4 for p in part.parameters()) for part in (model[0], *blocks)]
    assert [layer.parameter_bytes for layer in layers] == each
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in layers)
    # The loss behind the last layer has another size.
    assert [layer.activation_bytes for layer in layers] == [5 * 16 * 4] * 4


# ---------------------------------------------------------------------------------- graphs


def random_graph(rng: random.Random) -> tuple[list[Node], list[Edge]]:
    count = rng.randint(1, 12)
    places = rng.sample(range(count), count)  # a hidden order, so that the file's is another one
    nodes = [
        Node(
            label=f"n{i}",
            name=rng.choice("abc"),
            forward_ms=1,
            backward_ms=1,
            parameter_bytes=0,
            activation_bytes=float(rng.randint(1, 9)),
        )
        for i in range(count)
    ]
    edges = []
    for _ in range(rng.randint(0, 3 * count)):
        one, other = rng.randrange(count), rng.randrange(count)
        if places[one] < places[other]:
            edges.append(Edge(source=one, target=other, num_bytes=float(rng.randint(0, 9))))
    return nodes, edges


@pytest.mark.parametrize("seed", range(200))
def test_cuts_count_every_producer_once(seed):
    nodes, edges = random_graph(random.Random(seed))
    layers = chain_of([_numbered(node, i) for i, node in enumerate(nodes)], edges)
    order = [int(layer.parameter_bytes) - 1 for layer in layers]
    place = {node: position for position, node in enumerate(order)}
    assert sorted(order) == list(range(len(nodes)))
    assert all(place[edge.source] < place[edge.target] for edge in edges)
    for cut, layer in enumerate(layers):
        crossing = {}
        for edge in edges:
            if place[edge.source] <= cut < place[edge.target]:
                before = crossing.get(edge.source, 0)
                crossing[edge.source] = max(before, edge.num_bytes)
        assert layer.output_bytes == sum(crossing.values())
    assert len({layer.name for layer in layers}) == len(layers)


def _numbered(node: Node, index: int) -> Node:
    """The node with its index + 1 as parameters, by which the test knows it again."""
    return Node(
        label=node.label,
        name=node.name,
        forward_ms=1,
        backward_ms=1,
        parameter_bytes=index + 1,
        activation_bytes=node.activation_bytes,
    )


def test_cycles_are_refused_by_name():
    with pytest.raises(InputError, match=r"'node5', 'node6', 'node7' form a cycle"):
        imported(PIPEDREAM + "\tnode7 -- node5\n")
    with pytest.raises(InputError, match="'node8' form a cycle"):
        imported(PIPEDREAM + "\tnode8 -- node8\n")


# -------------------------------------------------------------------------------- clusters


def test_nvidia_topo():
    cluster = imported(NVIDIA_TOPO, assumed_gb_per_s={"NV": 25.0}).result
    assert [device.name for device in cluster.devices] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert {device.host for device in cluster.devices} == {"h0"}
    assert cluster.bandwidth_gb_per_s == (
        (0, 50, 12, 10),
        (50, 0, 12, 10),
        (12, 12, 0, 12),
        (10, 10, 12, 0),
    )


def test_equal_links_are_written_in_shorthand():
    text = NVIDIA_TOPO
    for kind in ("PIX", "PHB", "NODE", "SYS"):
        text = text.replace(kind, "NV2")
    cluster = imported(text).result
    assert cluster.document["hosts"] == [{"devices": 4, "bandwidth_gb_per_s": 40.0}]


def test_nccl_trees():
    """NVLinks; the narrower of two PCIe links; the way over the CPU, and between CPUs."""
    cluster = imported(NCCL).result
    assert cluster.bandwidth_gb_per_s == (
        (0, 80, 24, 10),
        (80, 0, 12, 10),
        (24, 12, 0, 10),
        (10, 10, 10, 0),
    )
    assert any("25 GB/s" in note for note in imported(NCCL).notes)


def test_nccl_switches_join_all_pairs():
    cluster = imported(NCCL_SWITCHED).result
    (group,) = cluster.document["hosts"]
    assert group["devices"] == 3
    assert group["bandwidth_gb_per_s"] == pytest.approx(18 * 20.6)


def test_matrices():
    cluster = imported(MATRIX_CSV).result
    assert [(d.name, d.host, d.memory_gb, d.speed) for d in cluster.devices] == [
        ("a", "h0", 16, 1),
        ("b", "h0", 16, 1),
        ("c", "h1", 32, 2),
    ]
    assert cluster.bandwidth_gb_per_s == ((0, 12, 1.25), (12, 0, 1.25), (1.5, 0, 0))


# ----------------------------------------------------------------------------- hostile files


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (PIPEDREAM.replace("node8 -- Add", "node7 -- Add"), "line 7: 'node7' is there already"),
        (PIPEDREAM + "\tnode8 -- node99\n", "there is no node 'node99'"),
        (
            PIPEDREAM.replace("parameter_size=33587200.000 -- ", "x -- "),
            "parameter_size is missing",
        ),
        (PIPEDREAM.replace("=2.491", "=nan"), "line 4: forward_compute_time: 'nan'"),
        (PIPEDREAM.replace("=2.491", "=-1"), "'node5': forward_ms: -1 is negative"),
        (PIPEDREAM.replace("=2.491", "=1e13"), "the most that a time may be"),
        (PIPEDREAM.replace("=2.491", "=1e-400"), "too small a number"),
        (PIPEDREAM.replace("=2.491", "=1e400"), "too large a number"),
        (PIPEDREAM.replace("131072.0]", "1e30]", 1), "'node5': output_bytes: 1e+30"),
        (PIPER.replace('"timePerSample": 0.030492', '"timePerSample": "x"'), "is not a number"),
        (PIPER.replace('"destId": 13', '"destId": 99'), "edges[1].destId: there is no node '99'"),
        (PIPER.replace('"id": 11', '"id": 10'), "nodes[1].id: '10' is taken by nodes[0]"),
        (PIPER.replace('"TMPCs"', '"other"', 1), "nodes[0].TMPCs: is missing"),
        (PIPER.replace("0.030492", "1e309"), "is not a finite number"),
        ('{"nodes": []}', "nodes: is empty"),
        ('{"format": "pipeplan.model/1"}', "is a file of pipeplan itself"),
        ('{"nodes": 3, "edges": []}', "nodes: is not a list"),
        ("[" * 100_000, "is nested deeper"),
        (LAYERS_CSV.replace("parameter_bytes", "params", 1), "'params' is no known column"),
        (LAYERS_CSV.replace("0.7", "x"), "line 4: forward_ms: 'x' is not a number"),
        (LAYERS_CSV.replace("head,", ","), "line 4: name: is empty"),
        (LAYERS_CSV.replace("head,", "embed,"), "layers[2].name: 'embed' is taken"),
        (LAYERS_CSV.replace(",131072000,1", ""), "line 4: has 4 cells for 6 columns"),
        (LAYERS_CSV.replace('first"', "first"), "is not CSV"),
        (NVIDIA_TOPO.replace("NODE", "WIFI"), "'WIFI' is no kind of link"),
        (NVIDIA_TOPO.replace("GPU3\tSYS", "GPU9\tSYS"), "there is no column of 'GPU9'"),
        (NVIDIA_TOPO.replace("GPU3\tSYS", "NIC9\tSYS"), "the line of GPU3 is missing"),
        (NVIDIA_TOPO.replace("GPU1", "GPU1\u200b"), "there is no column of 'GPU1"),
        (NVIDIA_TOPO.replace("GPU2\tGPU3", "GPUs\tGPU3", 1), "there is no column of 'GPU2'"),
        (MANY_GPUS, "has 513 GPUs; a host has at most 512"),
        (PIPER.replace('"Embedding"', r'"\ud800"'), "holds half a character"),
        (TRACE.replace("[[4, 10]]", '[["a", 10]]'), "is no shape of a tensor"),
        (MATRIX_CSV.replace("host;memory_gb", "host;host"), "the column host stands twice"),
        ("\x0c\n\x0c", "is empty"),
        (NVIDIA_TOPO.replace("GPU2\tPIX\tPHB\t X ", "GPU2\tPIX\tPHB\tPIX"), "X (itself)"),
        (NCCL.replace('dev="3"', 'dev="2"'), "two GPUs have dev 2"),
        (NCCL.replace('sm="80" rank="3"', ""), "sm is missing"),
        (NCCL.replace('count="4"', 'count="99999"'), "nvlink count: 99999 is above 1000"),
        (NCCL.replace("</system>", ""), "is not XML"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><system/>', "declaration"),
        ("<system/>", "there is no GPU"),
        (MATRIX_CSV.replace("c;h1", "d;h1"), "there is no column 'd'"),
        (MATRIX_CSV.replace("1.5", "1e10"), "the most that a bandwidth may be"),
        (MATRIX_CSV.replace(";2;1.5", ";0;1.5"), "line 4: speed: 0 is not above zero"),
        ("what is this", "is in no format that is known"),
        (json.dumps(trace() | {"traceEvents": []}), "neither annotations"),
        (TRACE.replace('"dur": 100', '"dur": -1', 1), "dur: -1 is not within"),
        (TRACE.replace('"Input Dims"', '"Dims"'), "record_shapes=True"),
        (TRACE.replace('["float"]', '["float1024"]'), "the size of type 'float1024' is not known"),
        (TRACE.replace('"name": "b"', '"name": "c"', 1), "runs 2 times"),
        ('{"traceEvents": 5}', "no trace of torch's profiler"),
    ],
)
def test_impossible_files_name_the_place(text, part):
    with pytest.raises(InputError) as raised:
        imported(text)
    assert part in str(raised.value)


def test_deep_xml_is_refused():
    nested = "<pci>" * 1000 + "<gpu dev='0' sm='80'/>" + "</pci>" * 1000
    with pytest.raises(InputError, match="nested deeper"):
        imported(f"<system>{nested}</system>")


@pytest.mark.parametrize("source_format", SAMPLES)
def test_damaged_files_are_read_or_refused(source_format):
    """Cut short, bytes changed, numbers replaced: a valid result or one line, nothing else."""
    text = SAMPLES[source_format]
    rng = random.Random(source_format)
    damaged = [text[: rng.randrange(1, len(text))] for _ in range(60)]
    for _ in range(120):
        begin = rng.randrange(len(text))
        cut = rng.choice([0, 1, 5])
        junk = rng.choice(
            ["", "9" * 400, "-1", "1e999", "nan", "\0", '"', "{", "<", "\n", "é", ";"]
        )
        damaged.append(text[:begin] + junk + text[begin + cut :])
    outcomes = [outcome(each, source_format) for each in damaged if each.strip()]
    assert all(len(line) < 1000 and "\n" not in line for line in outcomes)
    assert sum(line != "it" for line in outcomes) > len(outcomes) // 5


def outcome(text: str, source_format: str) -> str:
    """The name of what was read, or why it was refused; other exceptions pass."""
    try:
        return imported(text, source_format).result.name
    except InputError as problem:
        return str(problem)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (PIPEDREAM.encode("utf-16"), "is not UTF-8 text (byte 0)"),
        (b"node1 -- \xff\xfe", "is not UTF-8"),
        (b"", "is empty"),
        (b"\n\n  \n", "is empty"),
        (PIPEDREAM.encode()[:300], "line 3: is neither a node nor an edge"),
        (PIPER.encode()[:500], "is not JSON"),
        (b"\x00" * 100, "no format"),
        (gzip.compress(PIPEDREAM.encode(), mtime=0)[:60], "is packed by gzip, but damaged"),
    ],
    ids=["utf-16", "latin", "nothing", "blanks", "cut text", "cut json", "nulls", "cut gzip"],
)
def test_the_command_refuses_in_one_line(tmp_path, capfd, data, part):
    source, output = tmp_path / "source", tmp_path / "out.model.json"
    source.write_bytes(data)
    code, out, err = run_command(capfd, "import", source, "-o", output)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err
    assert str(source) in err
    assert not output.exists()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_large_files_are_refused_unpacked_too(tmp_path, monkeypatch, pack):
    monkeypatch.setattr("pipeplan.interop.source_text.MAX_JSON_BYTES", 1000)
    source = tmp_path / "large"
    source.write_bytes(pack(b"node1 -- " * 1000))
    with pytest.raises(InputError, match=r"is larger than 0\.001 MB"):
        read_text(str(source))


def test_the_command_writes_models_and_clusters(tmp_path, capfd):
    source, output = tmp_path / "gnmt.txt", tmp_path / "out.model.json"
    source.write_text("\ufeff" + PIPEDREAM)
    code, out, err = run_command(capfd, "import", source, "-o", output, "--microbatch-size", 64)
    assert code == 0
    assert out == f"{output}: model of 7 layers, 20.439 ms a microbatch, 0.1996 GB of parameters\n"
    assert err == "pipeplan: note: input nodes cost nothing: 'node2' had times or parameters\n"
    assert read_model(output).name == "gnmt"
    source.write_bytes(gzip.compress(PIPEDREAM.encode()))
    again = tmp_path / "again.model.json"
    run_command(capfd, "import", source, "-o", again, "--microbatch-size", 64)
    assert again.read_bytes() == output.read_bytes()
    source.write_text(NVIDIA_TOPO)
    arguments = ("--from", "nvidia-topo", "--assume", "NV=25,SYS=9", "--name", "mine")
    code, out, err = run_command(capfd, "import", source, "-o", output, *arguments)
    assert code == 0
    assert "NV=25, PCIE=12, SYS=9 GB/s are assumed" in err
    assert read_cluster(output).bandwidth_gb_per_s[0] == (0, 50, 12, 9)
    assert read_cluster(output).name == "mine"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--from", "pipedraem"), "did you mean 'pipedream'?"),
        (("--assume", "NV=x"), "assume: NV: 'x' is not a number"),
        (("--assume", "WIFI=3"), "'WIFI' is no kind"),
        (("--assume", "NV=1e12"), "the most that a bandwidth may be"),
    ],
)
def test_the_command_refuses_other_settings(tmp_path, capfd, arguments, part):
    source = tmp_path / "topo.txt"
    source.write_text(NVIDIA_TOPO)
    output = tmp_path / "out.json"
    code, out, err = run_command(capfd, "import", source, "-o", output, *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err


def test_a_graph_may_begin_with_its_edges():
    edges, nodes = [], []
    for line in PIPEDREAM.splitlines():
        (nodes if "forward_compute_time=" in line else edges).append(line)
    assert edges
    turned = "\n".join([*edges, *nodes])
    assert recognise(turned) == "pipedream"
    assert imported(turned).result == imported(PIPEDREAM).result


def test_options_that_do_not_apply_are_refused():
    for name, text in SAMPLES.items():
        if name not in ("nvidia-topo", "nccl"):
            with pytest.raises(InputError, match="assume: does not apply to"):
                imported(text, name, assumed_gb_per_s={"NV": 25.0})
        if name in CLUSTERS:
            with pytest.raises(InputError, match="microbatch-size: does not apply to"):
                imported(text, name, microbatch_size=4)


def test_piper_s_times_are_said_to_be_of_the_microbatch():
    assert not any("timePerSample" in note for note in imported(PIPER).notes)
    found = imported(PIPER, microbatch_size=8)
    assert any("of 8 samples together" in note for note in found.notes)
    assert found.result.layers == imported(PIPER).result.layers
