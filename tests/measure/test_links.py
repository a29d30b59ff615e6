"""Links that are really measured. How exactly is a matter of benchmarks/links."""

import os
import subprocess
import sys

import pytest

from pipeplan.cluster import HostGroup, expand_hosts
from pipeplan.documents.files import read_cluster
from pipeplan.errors import InputError, RuntimeMismatchError
from pipeplan.testbed.orders import Way

torch = pytest.importorskip("torch")

from pipeplan.measure.all_links import (  # noqa: E402
    _pairs_with_company,
    _RankPlace,
    _require_one_machine_a_name,
)
from pipeplan.measure.rounds import pair_rounds  # noqa: E402
from pipeplan.testbed.door import Testbed  # noqa: E402
from runtime.workers import few_at_once, free_port  # noqa: E402

GENEROUS = 0.3
"""Tests share the machine with each other."""


def require_near(found: float, true: float) -> None:
    assert (1 - GENEROUS) * true < found < (1 + GENEROUS) * true


def require_links(found, true) -> None:
    for a, (found_row, true_row) in enumerate(
        zip(found.bandwidth_gb_per_s, true.bandwidth_gb_per_s, strict=True)
    ):
        for b, pair in enumerate(zip(found_row, true_row, strict=True)):
            if a != b:
                require_near(*pair)


@pytest.fixture(scope="module")
def testbed():
    with Testbed() as made:
        if made.way is not Way.NAMESPACES:
            pytest.skip(f"no network namespaces here: {made.note}")
        yield made


def test_pairs_and_cards_of_emulated_hosts(testbed):
    cluster = expand_hosts(
        "cards",
        [
            HostGroup(devices=2, bandwidth_gb_per_s=0.3, name="alpha", uplink_gb_per_s=0.12),
            HostGroup(devices=2, bandwidth_gb_per_s=0.2, name="beta", uplink_gb_per_s=0.12),
        ],
        between_hosts_gb_per_s=0.1,
    )
    with few_at_once():
        found, notes = testbed.measure_links(cluster, seconds=3.0)
    assert notes == ()
    assert [(d.name, d.host) for d in found.devices] == [(d.name, d.host) for d in cluster.devices]
    require_links(found, cluster)
    for host in ("alpha", "beta"):
        require_near(found.uplink_gb_per_s[host], 0.12)


def test_hosts_without_a_card_get_none(testbed):
    cluster = expand_hosts(
        "free", [HostGroup(count=3, devices=1)], between_hosts_gb_per_s=0.05, latency_us=7.0
    )
    with few_at_once():
        found, _ = testbed.measure_links(cluster, seconds=3.0)
    require_links(found, cluster)
    cards = [found.uplink_gb_per_s or {}, found.shared]
    # A busy machine may slow several flows down; then the sum is near that of the single ones.
    for gb_per_s in cards[0].values():
        assert gb_per_s > 2 * 0.05 * (1 - GENEROUS)
    assert all(link.gb_per_s > 2 * 0.05 * (1 - GENEROUS) for link in cards[1])


def test_paced_sockets_are_measured_too():
    cluster = expand_hosts("paced", [HostGroup(devices=3, bandwidth_gb_per_s=0.08)])
    with few_at_once(), Testbed(Way.PACING) as testbed:
        found, _ = testbed.measure_links(cluster, seconds=2.0)
    require_links(found, cluster)
    assert len({device.host for device in found.devices}) == 1
    shared = expand_hosts(
        "shared",
        [HostGroup(count=2, devices=2, bandwidth_gb_per_s=1.0)],
        between_hosts_gb_per_s=1.0,
        uplink_gb_per_s=1.0,
    )
    with pytest.raises(RuntimeMismatchError, match="pacing cannot emulate"):
        testbed.measure_links(shared)


# ---------------------------------------------------------------------------- the command


def torchrun(*arguments: object, num_ranks: int = 4) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    with few_at_once():
        return subprocess.run(
            [*command, "--master-port", str(free_port()), "-m", "pipeplan.measure.links"]
            + [str(argument) for argument in arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=300,
        )


def test_four_local_processes(tmp_path):
    output = tmp_path / "here.cluster.json"
    ended = torchrun("-o", output, "--seconds", "2", "--name", "here")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{output}: 4 devices on 1 host, ")
    cluster = read_cluster(output)
    assert cluster.name == "here"
    assert {device.host for device in cluster.devices} == {os.uname().nodename}
    assert all(device.memory_gb > 0.1 for device in cluster.devices)
    assert cluster.links == ()
    for matrix in (cluster.bandwidth_gb_per_s, cluster.latency_us):
        assert all(matrix[a][b] > 0 for a in range(4) for b in range(4) if a != b)


def test_wrong_calls_are_refused_before_anybody_waits(tmp_path, monkeypatch):
    from pipeplan.measure.links import links_command

    monkeypatch.delenv("RANK", raising=False)
    output = str(tmp_path / "x.json")
    with pytest.raises(InputError, match="ranks: start this with torchrun"):
        links_command(["-o", output], standalone_mode=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="cannot be written: is there a folder"):
        links_command(["-o", str(tmp_path / "nowhere" / "x.json")], standalone_mode=False)
    for seconds in ("0", "nan", "inf", "-3"):
        with pytest.raises(InputError, match="seconds: is "):
            links_command(["-o", output, "--seconds", seconds], standalone_mode=False)


# ------------------------------------------------------------------------------- places


def test_two_machines_with_one_name_are_refused():
    places = [
        _RankPlace(host="node", machine=machine, memory_bytes=None, is_cpu=True)
        for machine in "aab"
    ]
    _require_one_machine_a_name(places[:2])
    with pytest.raises(InputError, match="rank 2 runs on another machine that is also called"):
        _require_one_machine_a_name(places)


def test_pairs_that_had_company_are_measured_again():
    hosts = [f"h{n}" for n in range(8)]
    again = _pairs_with_company(pair_rounds(hosts), hosts)
    assert len(again) == len(set(again)) == 3
    assert _pairs_with_company(pair_rounds(["a", "a", "b", "b"]), ["a", "a", "b", "b"]) == []
