"""Joining the ranks that torchrun starts, also when it starts them again."""

import os

import torch
import torch.distributed as dist

from pipeplan.errors import InputError

__all__ = ["join_ranks"]

STORE_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_ranks() -> None:
    """Initialize torch.distributed from torchrun's environment: NCCL with GPUs, else gloo.

    torchrun's agent keeps its store over restarts, and with it the addresses of ranks that are no
    more; each start gets a prefix of its own, so that nobody calls the dead.
    """
    missing = [name for name in STORE_VARIABLES if name not in os.environ]
    if missing:
        raise InputError(f"{missing[0]}: is not set; start the ranks with torchrun")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"start-{start}", store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
