"""Loses a device on one machine: three nodes of one rank each, one of which is killed for good.

    python examples/elastic/restart.py

Each node is a torchrun of its own. The last one is killed together with its rank; the two others
find each other again, plan for two devices and go on from the last checkpoint.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_NODES = 3
TRAIN = Path(__file__).with_name("train.py")


def start_node(node: int, port: int, folder: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", f"2:{NUM_NODES}", "--nproc-per-node", "1", "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-id", "example", "--local-addr", "127.0.0.1"]
    command += ["--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=5", str(TRAIN)]
    environment = {**os.environ, "CHECKPOINTS": folder, "STEPS": "9"}
    return subprocess.Popen(command, env=environment, start_new_session=True)  # noqa: S603


def main() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        nodes = [start_node(node, port, folder) for node in range(NUM_NODES)]
        try:
            deadline = time.monotonic() + 90
            while not list(Path(folder).glob("step-*")) and time.monotonic() < deadline:
                time.sleep(0.1)
            print("a checkpoint is there: the last node is lost", flush=True)
            os.killpg(nodes[-1].pid, signal.SIGKILL)
            return max(node.wait(timeout=180) for node in nodes[:-1])
        finally:
            for node in nodes:
                if node.poll() is None:
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()


if __name__ == "__main__":
    sys.exit(main())
