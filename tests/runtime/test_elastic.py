"""Starts are told apart, and runs go on when nodes come and go.

Nodes are agents of torchrun on addresses of their own, 127.0.0.1 and on. Agents are ranked by
address, and the rendezvous is held by a node that stays.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pipeplan.runtime.supervision.launching import agree_on_start  # noqa: E402
from runtime.workers import few_at_once, free_port  # noqa: E402

TRAIN = Path(__file__).parents[2] / "examples" / "elastic" / "train.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
QUICK = "last_call_timeout=2,keep_alive_interval=1,join_timeout=120"
PATIENT_S = 240.0
NUM_STEPS = 40
"""With the pauses, time enough for a node to come."""


def names_of_start(port, ranks, world_size, patience_s=30.0):
    """What each of these ranks, newly started, takes for the name of its start."""
    names = {}

    def join(rank):
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with contextlib.suppress(TimeoutError, dist.DistError):
            names[rank] = agree_on_start(store, rank, world_size, patience_s)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return names


def test_each_start_has_a_name_of_its_own():
    """In whatever order ranks come, and however many they are, on one store."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True)
    seen = set()
    for ranks in ([0, 1, 2], [2, 1, 0], [1, 0], [3, 0, 2, 1], [0]):
        names = names_of_start(kept.port, ranks, len(ranks))
        assert sorted(names) == sorted(ranks)
        assert len(set(names.values())) == 1
        seen |= set(names.values())
    assert len(seen) == 5


def test_a_start_that_nobody_finished_is_not_taken_up():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True)
    assert names_of_start(kept.port, [0, 1], 3, patience_s=1.0) == {}
    names = names_of_start(kept.port, [1, 2, 0], 3)
    assert sorted(names) == [0, 1, 2]
    assert len(set(names.values())) == 1


class Nodes:
    """Agents of torchrun that act as nodes, each with its ranks ended in any case."""

    def __init__(self, folder, host, steps, *, shares_store=False):
        self._folder, self._host, self._port = folder, host, free_port()
        self.steps, self._shares_store = steps, shares_store
        self.agents = {}

    def start(self, node):
        options = (
            *("--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.{self._host}:{self._port}"),
            *("--rdzv-id", "test", "--local-addr", f"127.0.0.{node}"),
            *("--rdzv-conf", f"is_host={int(node == self._host)},{QUICK}"),
        )
        environment = {
            **settings(self._folder, self.steps),
            "PAUSE_S": "0.3",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if self._shares_store else "1",
            "NODE": self._mark(node),
        }
        files = [self._folder / f"{kind}-{node}" for kind in ("stdout", "stderr")]
        with open(files[0], "w") as stdout, open(files[1], "w") as stderr:
            self.agents[node] = subprocess.Popen(
                [*TORCHRUN, *options, str(TRAIN)], env=environment, stdout=stdout, stderr=stderr
            )

    def kill(self, node):
        """End the agent and its ranks at once, as if the node were gone."""
        for process in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agents[node].wait()

    def processes(self, node):
        """The agent of a node and its ranks: they inherit a variable that names it."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"NODE={self._mark(node)}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def said(self, node, kind="stdout"):
        return (self._folder / f"{kind}-{node}").read_text()

    def await_step(self, step):
        deadline = time.monotonic() + PATIENT_S
        while not any(step in losses_in(self.said(node)) for node in self.agents):
            codes = [agent.poll() for agent in self.agents.values()]
            said = [self.said(node, "stderr") for node in self.agents]
            assert set(codes) == {None}, f"exit codes {codes}: {said}"
            assert time.monotonic() < deadline, said
            time.sleep(0.05)

    def wait(self):
        """By node, the exit code of its agent; None where it still runs."""
        deadline = time.monotonic() + PATIENT_S
        while any(agent.poll() is None for agent in self.agents.values()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return {node: agent.poll() for node, agent in self.agents.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.agents:
            self.kill(node)

    def _mark(self, node):
        return f"{self._folder}/{node}"


def settings(folder, steps):
    """The environment of the example."""
    checkpoints = str(folder / "saved")
    return {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps), "CHECKPOINTS": checkpoints}


def losses_in(text):
    """By step, the last loss printed."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)\n", text)}


def plans_in(text):
    """For how many devices each plan was made, and after which step it began."""
    found = re.findall(r"plan: .* on (\d+) devices; after step (\d+)\n", text)
    return [(int(devices), int(step)) for devices, step in found]


@pytest.fixture(scope="module")
def undisturbed_losses(tmp_path_factory):
    """The losses of a run on one device."""
    command = [*TORCHRUN, "--master-port", str(free_port()), str(TRAIN)]
    environment = settings(tmp_path_factory.mktemp("undisturbed"), NUM_STEPS)
    with few_at_once():
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return losses_in(done.stdout)


def check_end(nodes, staying, undisturbed_losses):
    """All nodes that stay end well, with the losses of an undisturbed run, and nothing is left."""
    codes = nodes.wait()
    said = {node: nodes.said(node, "stderr") for node in staying}
    assert [codes[node] for node in staying] == [0] * len(staying), said
    assert [nodes.processes(node) for node in nodes.agents] == [[]] * len(nodes.agents)
    found = [losses_in(nodes.said(node)) for node in nodes.agents]
    assert set().union(*found) == set(range(1, nodes.steps + 1))
    for losses in found:
        expected = {step: undisturbed_losses[step] for step in losses}
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lost", "first_left", "shares_store"),
    [
        pytest.param(1, 2, False, id="the-node-of-rank-0"),
        pytest.param(2, 1, False, id="another-node"),
        pytest.param(2, 1, True, id="another-node-of-a-shared-store"),
    ],
)
def test_losing_a_node_leads_to_a_new_plan(
    tmp_path, undisturbed_losses, lost, first_left, shares_store
):
    with few_at_once(), Nodes(tmp_path, 3, 10, shares_store=shares_store) as nodes:
        for node in (1, 2, 3):
            nodes.start(node)
        nodes.await_step(3)
        nodes.kill(lost)
        check_end(nodes, [node for node in (1, 2, 3) if node != lost], undisturbed_losses)
        assert plans_in(nodes.said(1))[0] == (3, 0)
        devices, step = plans_in(nodes.said(first_left))[-1]
    assert devices == 2
    assert step >= 2


@pytest.mark.full
@pytest.mark.parametrize("late", [1, 3], ids=["becomes-rank-0", "becomes-the-last"])
def test_a_node_that_comes_leads_to_a_new_plan(tmp_path, undisturbed_losses, late):
    early = [node for node in (1, 2, 3) if node != late]
    with few_at_once(), Nodes(tmp_path, 2, NUM_STEPS) as nodes:
        for node in early:
            nodes.start(node)
        nodes.await_step(1)
        nodes.start(late)
        check_end(nodes, [1, 2, 3], undisturbed_losses)
        assert plans_in(nodes.said(early[0]))[0] == (2, 0)
        devices, step = plans_in(nodes.said(1))[-1]
    assert devices == 3
    assert step >= 2
