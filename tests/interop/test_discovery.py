"""Texts of known machines give the right clusters; damaged ones one clear line."""

import random

import pytest

from command_line import run_command
from interop import topologies
from pipeplan.documents.files import read_cluster
from pipeplan.errors import InputError
from pipeplan.interop.discovery import (
    DiscoverySettings,
    discover_from_texts,
    discover_processes,
    usable_memory_gb,
)
from pipeplan.interop.imported import ImportSettings
from pipeplan.interop.importing import import_text
from pipeplan.measure import machine


def discovered(*texts: str, hosts=("node",), **fields):
    settings = DiscoverySettings(name="it", hosts=hosts, **fields)
    return discover_from_texts([(f"text {n}", text) for n, text in enumerate(texts)], settings)


def matrix(cluster):
    size = cluster.num_devices
    return [
        [0 if a == b else cluster.bandwidth_gb_per_s[a][b] for b in range(size)]
        for a in range(size)
    ]


def mesh(near: float, far: float) -> list[list[float]]:
    """A DGX-1 with 20 GB/s a link, by its links; others over one switch, or farther."""

    def between(a: int, b: int) -> float:
        links = topologies.MESH.get(frozenset((a, b)), 0)
        return 20.0 * links or (near if a // 2 == b // 2 else far)

    return [[0 if a == b else between(a, b) for b in range(8)] for a in range(8)]


# ------------------------------------------------------------------------ known machines


@pytest.mark.parametrize("text", [topologies.DGX1_OLD, topologies.DGX1_NEW], ids=["old", "new"])
def test_hybrid_mesh(text):
    found = discovered(text, topologies.NVLINKS_V100, topologies.MEMORY_V100)
    cluster = found.result
    assert matrix(cluster) == mesh(12.0, 10.0)
    assert [device.name for device in cluster.devices] == [f"noded{n}" for n in range(8)]
    assert {device.host for device in cluster.devices} == {"node"}
    # 16160 MiB are 16.94 GB; 1.5 GB are left to the framework.
    assert {device.memory_gb for device in cluster.devices} == {15.4}
    assert not any("is a link down" in note for note in found.notes)
    assert any("4 network cards of unknown rate" in note for note in found.notes)
    assert all(sum(row) == 6 for row in _num_links())


def _num_links() -> list[list[int]]:
    links = topologies.MESH
    return [[links.get(frozenset((a, b)), 0) for b in range(8) if a != b] for a in range(8)]


def test_hybrid_mesh_by_nccl():
    """NVLinks as above; without them the PCIe 3.0 switches, or the link between sockets."""
    found = discovered(topologies.NCCL_DGX1, topologies.MEMORY_V100)
    assert matrix(found.result) == mesh(12.0, 10.0)
    assert {link.out_gb_per_s for link in found.result.links} == {50.0}


@pytest.mark.parametrize(
    ("text", "status", "gb_per_s"),
    [
        (topologies.DGX_A100, topologies.NVLINKS_A100, 12 * 20.0),
        (topologies.DGX_H100, topologies.NVLINKS_H100, 18 * 20.6),
    ],
    ids=["a100", "h100"],
)
def test_nvswitch(text, status, gb_per_s):
    found = discovered(text, status)
    (group,) = found.result.document["hosts"]
    assert group["bandwidth_gb_per_s"] == pytest.approx(gb_per_s)
    assert (group["devices"], group["names"]) == (8, ("node",))
    assert not any("is a link down" in note for note in found.notes)
    assert any("memory is unknown" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "gb_per_s", "uplink"),
    [(topologies.NCCL_A100, 12 * 20.0, 200.0), (topologies.NCCL_H100, 18 * 20.6, 400.0)],
    ids=["a100", "h100"],
)
def test_nvswitch_by_nccl_for_several_hosts(text, gb_per_s, uplink):
    """Between hosts, one pair has one card, and a host all of them."""
    found = discovered(text, topologies.MEMORY_H100, hosts=("n1", "n2", "n3"))
    cluster = found.result
    (group,) = cluster.document["hosts"]
    assert group["bandwidth_gb_per_s"] == pytest.approx(gb_per_s)
    assert (group["count"], group["uplink_gb_per_s"]) == (3, uplink)
    assert cluster.document["between_hosts_gb_per_s"] == uplink / 8
    assert cluster.devices[8].name == "n2d0"
    assert cluster.devices[8].memory_gb == 84.0  # 81559 MiB are 85.52 GB, less 1.5


def test_pcie_box_with_cards():
    found = discovered(topologies.PCIE_BOX, assumed_gb_per_s={"PCIE": 24.0, "SYS": 9.0})
    expected = [
        [0 if a == b else 24.0 if a // 4 == b // 4 else 9.0 for b in range(8)] for a in range(8)
    ]
    assert matrix(found.result) == expected
    assert any("2 network cards" in note for note in found.notes)


def test_other_layouts_say_the_same():
    """Blanks for tabs, a prompt above, codes of terminals, line ends of other systems."""
    text = topologies.DGX1_NEW
    expected = matrix(discovered(text).result)
    plain = text.replace(topologies.ON, "").replace(topologies.OFF, "")
    for other in (
        plain,
        plain.replace("\t", "    "),
        "$ nvidia-smi topo -m\n" + text,
        text.replace("\n", "\r\n"),
        text.replace("GPU1", "\x1b[1;4mGPU1\x1b[0m"),
    ):
        assert matrix(discovered(other).result) == expected
        assert matrix(import_text(other, ImportSettings(name="it")).result) == expected


def test_a_single_gpu():
    text = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n"
    cluster = discovered(text, topologies.memory_query("T4", 1, 15360)).result
    assert (cluster.num_devices, cluster.devices[0].memory_gb) == (1, 14.6)


def test_sixteen_gpus():
    text = topologies._table(
        topologies._kinds(16, lambda a, b: "NV6"), [], ["CPU Affinity"], lambda gpu: ["0-23"]
    )
    (group,) = discovered(text).result.document["hosts"]
    assert (group["devices"], group["bandwidth_gb_per_s"]) == (16, 120.0)


def test_an_nvlink_that_is_down_is_noted():
    status = topologies.NVLINKS_V100.replace("Link 5: 25.781 GB/s", "Link 5: <inactive>", 1)
    found = discovered(topologies.DGX1_NEW, status)
    (note,) = [note for note in found.notes if "is a link down" in note]
    assert note.startswith("GPU0: 5 NVLinks are active, but the matrix counts 6")


def test_the_slower_of_two_gpus_decides():
    status = topologies.NVLINKS_A100.replace("25 GB/s", "20 GB/s", 12)  # GPU 0
    cluster = discovered(topologies.DGX_A100, status).result
    assert cluster.bandwidth_gb_per_s[0][1] == 12 * 18.0
    assert cluster.bandwidth_gb_per_s[1][2] == 12 * 20.0


def test_wires_of_other_rates_count_four_fifths():
    status = topologies.nvlink_status("next", 8, 12, "100")
    assert discovered(topologies.DGX_A100, status).result.bandwidth_gb_per_s[0][1] == 960.0


def test_assumed_nvlinks_go_before_the_wires():
    found = discovered(topologies.DGX_A100, topologies.NVLINKS_A100, assumed_gb_per_s={"NV": 25.0})
    assert found.result.bandwidth_gb_per_s[0][1] == 300.0


def test_processes():
    settings = DiscoverySettings(name="it", hosts=("vm",), assumed_gb_per_s={"CPU": 3.0})
    found = discover_processes(4, 32e9, settings)
    assert found.result.document["hosts"] == [
        {"devices": 4, "bandwidth_gb_per_s": 3.0, "memory_gb": 7.5, "names": ("vm",)}
    ]
    assert "measure: torchrun --nproc-per-node 4" in found.notes[0]
    alone = discover_processes(1, None, settings)
    assert (alone.result.num_devices, alone.notes) == (1, ())


def test_memory_is_rounded_down_and_never_zero():
    assert usable_memory_gb(16.16e9, is_gpu=True) == 14.6
    assert usable_memory_gb(1e6, is_gpu=True) == 0.1


# ------------------------------------------------------------------------ damaged texts


def without_line(text: str, start: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith(start))


@pytest.mark.parametrize(
    ("texts", "part"),
    [
        (["what is this"], "text 0: is neither what 'nvidia-smi topo -m' prints"),
        ([topologies.NVLINKS_V100], "no text tells which GPUs are linked"),
        ([topologies.MEMORY_V100], "no text tells which GPUs are linked"),
        ([topologies.DGX1_NEW, topologies.DGX1_OLD], "text 1: is a second text of nvidia-smi topo"),
        ([topologies.DGX1_NEW.replace("NV2", "NV9", 1)], "NV2 in one line and NV9 in the other"),
        ([topologies.DGX1_NEW.replace("NV2", "NVx", 1)], "'NVx' is no kind of link"),
        ([topologies.DGX1_NEW.replace("NV2", "NV0")], "'NV0' is no kind of link"),
        ([without_line(topologies.DGX1_NEW, "GPU5")], "the line of GPU5 is missing"),
        ([topologies.DGX1_NEW.replace("GPU1\t", "GPU0\t", 1)], "the column GPU0 stands twice"),
        ([topologies.PCIE_BOX[:200]], "the line of GPU"),
        ([topologies.PCIE_BOX.replace("GPU7", "GPUx")], "there is no column of 'GPUx'"),
        (
            [topologies.DGX1_NEW, topologies.nvlink_status("x", 4, 6, "25")],
            "nvidia-smi nvlink -s: has 4 GPUs",
        ),
        (
            [topologies.DGX1_NEW, topologies.nvlink_status("x", 8, 0, "25")],
            "GPU0: has NVLinks in 'nvidia-smi topo -m', but no active ones",
        ),
        (
            [topologies.DGX1_NEW, topologies.NVLINKS_V100.replace("25.781", "nan", 1)],
            "text 1: line 2: 'nan' is not a number",
        ),
        (
            [topologies.DGX1_NEW, topologies.NVLINKS_V100.replace("25.781", "1e300", 1)],
            "is no rate of an NVLink",
        ),
        ([topologies.DGX1_NEW, topologies.NVLINKS_V100 * 2], "GPU 0 stands twice"),
        ([topologies.DGX1_NEW, topologies.NVLINKS_V100 + "oops\n"], "'oops' is neither a GPU nor"),
        (
            [topologies.DGX1_NEW, topologies.NVLINKS_V100.replace("Link 1", "Link 0", 1)],
            "link 0 of GPU 0 stands twice",
        ),
        (
            [topologies.DGX1_NEW, topologies.memory_query("x", 7, 100)],
            "GPU7: its memory is missing",
        ),
        ([topologies.DGX1_NEW, topologies.memory_query("x", 9, 100)], "--query-gpu: has 9 GPUs"),
        ([topologies.DGX1_NEW, topologies.MEMORY_V100.replace("MiB\n", "ells\n")], "is no unit"),
        (
            [topologies.DGX1_NEW, topologies.MEMORY_V100.replace("16160", "-5")],
            "no memory of a GPU",
        ),
        ([topologies.DGX1_NEW, "index, memory.total [MiB]\n"], "there is no GPU"),
        ([topologies.NCCL_A100, "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n"], "NCCL's XML: has 8"),
        ([topologies.NCCL_A100[:700]], "is not XML"),
    ],
)
def test_damaged_texts_are_refused(texts, part):
    with pytest.raises(InputError) as raised:
        discovered(*texts)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_several_hosts_need_a_rate_between_them():
    with pytest.raises(InputError, match="nobody says how fast the network between 2 hosts is"):
        discovered(topologies.DGX_A100, hosts=("a", "b"))


TEXTS = {
    "topo": topologies.DGX1_NEW,
    "nvlink": topologies.NVLINKS_V100,
    "memory": topologies.MEMORY_V100,
    "nccl": topologies.NCCL_DGX1,
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_with_damage_are_read_or_refused(kind):
    """Cut short, bytes changed, numbers replaced: a valid cluster or one line, nothing else."""
    rng = random.Random(kind)
    beside = [] if kind in ("topo", "nccl") else [topologies.DGX1_NEW]
    junk = ["", "9" * 400, "-1", "1e999", "nan", "\0", '"', "<", "\n", "é", "\u202e", "GPU0", "\t"]
    refused = []
    for _ in range(150):
        text = TEXTS[kind]
        begin = rng.randrange(len(text))
        if rng.random() < 0.3:
            text = text[:begin]
        else:
            text = text[:begin] + rng.choice(junk) + text[begin + rng.choice([0, 1, 5]) :]
        try:
            cluster = discovered(text, *beside).result
        except InputError as problem:
            refused.append(str(problem))
        else:
            assert all(rate >= 0 for row in matrix(cluster) for rate in row)
    assert len(refused) > 15
    assert all("\n" not in line and len(line) < 600 for line in refused)


# ---------------------------------------------------------------------------- the command


def test_the_command_reads_recorded_texts(tmp_path, capfd):
    topo, links, memory = (tmp_path / name for name in ("a.txt", "b.txt", "c.csv"))
    topo.write_text(topologies.DGX_H100)
    links.write_text(topologies.NVLINKS_H100)
    memory.write_text(topologies.MEMORY_H100)
    output = tmp_path / "here.cluster.json"
    sources = [word for path in (memory, topo, links) for word in ("--from", path)]
    code, out, err = run_command(
        capfd, "discover", *sources, "--hosts", "dgx", "--name", "h100", "-o", output
    )
    assert (code, out) == (0, f"{output}: 8 devices on 1 host, 371 to 371 GB/s\n")
    assert all(line.startswith("pipeplan: note: ") for line in err.splitlines())
    assert "called h0" not in err
    cluster = read_cluster(output)
    assert cluster.name == "h100"
    assert {(device.host, device.memory_gb) for device in cluster.devices} == {("dgx", 84.0)}
    again = tmp_path / "again.json"
    run_command(capfd, "discover", *sources, "--hosts", "dgx", "--name", "h100", "-o", again)
    assert again.read_bytes() == output.read_bytes()


def test_the_command_takes_processes_for_devices(tmp_path, capfd):
    output = tmp_path / "here.cluster.json"
    code, out, _ = run_command(
        capfd, "discover", "--processes", 3, "--hosts", "x", "--assume", "CPU=2", "-o", output
    )
    assert (code, out) == (0, f"{output}: 3 devices on 1 host, 2 to 2 GB/s\n")
    assert read_cluster(output).devices[2].name == "xd2"
    code, _, _ = run_command(capfd, "plan", "vgg19", output, "-m", 4)
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--from", "{topo}", "--processes", "2"), "--processes: stands beside --from"),
        (("--from", "{topo}", "--hosts", "a,,b"), "--hosts: one of the names is empty"),
        (("--from", "{topo}", "--hosts", "a,a"), "--hosts: 'a' stands twice"),
        (("--from", "{topo}", "--assume", "WIFI=1"), "'WIFI' is no kind"),
        (("--from", "{topo}", "--from", "{topo}"), "is a second text"),
        (("--from", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (("--processes", "0"), "--processes"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capfd, arguments, part):
    (tmp_path / "topo.txt").write_text(topologies.DGX_A100)
    given = [each.format(topo=tmp_path / "topo.txt") for each in arguments]
    code, out, err = run_command(capfd, "discover", *given, "-o", tmp_path / "x.json")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err
    assert not (tmp_path / "x.json").exists()


# ------------------------------------------------------------------------- this machine


def pretend(tmp_path, monkeypatch, script: str) -> None:
    """Let `nvidia-smi` be a script."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_the_command_asks_nvidia_smi(tmp_path, capfd, monkeypatch):
    for name, text in (
        ("topo", topologies.DGX1_NEW),
        ("nvlink", topologies.NVLINKS_V100),
        ("--query-gpu=index,name,memory.total", topologies.MEMORY_V100),
    ):
        (tmp_path / name).write_text(text)
    pretend(tmp_path, monkeypatch, f'cat -- "{tmp_path}/$1"\n')
    monkeypatch.setattr(machine, "network_cards_gb_per_s", lambda: (12.5, 12.5))
    output = tmp_path / "here.cluster.json"
    code, out, _ = run_command(capfd, "discover", "--hosts", "a,b", "-o", output)
    assert (code, out) == (0, f"{output}: 16 devices on 2 hosts, 10 to 40 GB/s, 2 shared cards\n")
    cluster = read_cluster(output)
    assert [row[:8] for row in matrix(cluster)[:8]] == mesh(12.0, 10.0)
    assert {link.out_gb_per_s for link in cluster.links} == {25.0}
    assert cluster.bandwidth_gb_per_s[0][8] == 12.5


def test_a_broken_driver_is_said(tmp_path, capfd, monkeypatch):
    pretend(tmp_path, monkeypatch, 'echo "NVIDIA-SMI has failed because"; exit 9\n')
    code, _, err = run_command(capfd, "discover", "-o", tmp_path / "x.json")
    assert code == 2
    assert "nvidia-smi topo -m: failed: NVIDIA-SMI has failed because; for processes" in err


def test_without_gpus_it_says_what_to_do(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run_command(capfd, "discover", "-o", tmp_path / "x.json")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "give --processes for processes on CPUs" in err


def test_cards_of_the_kernel(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    assert machine._infiniband_gb_per_s(port) == 25.0
    (port / "state").write_text("1: DOWN\n")
    assert machine._infiniband_gb_per_s(port) == 0.0
    card = tmp_path / "eth0"
    card.mkdir()
    (card / "operstate").write_text("up\n")
    for text, gb_per_s in (("10000\n", 1.25), ("-1\n", 0.0), ("x\n", 0.0)):
        (card / "speed").write_text(text)
        assert machine._ethernet_gb_per_s(card) == gb_per_s


def test_a_link_without_bandwidth_is_refused(capfd, tmp_path):
    arguments = ("discover", "--processes", 2, "-o", tmp_path / "c.json", "--assume")
    code, _, err = run_command(capfd, *arguments, "CPU=0")
    assert (code, err.count("\n")) == (2, 1)
    assert "assume: CPU=0 would leave no such link" in err
