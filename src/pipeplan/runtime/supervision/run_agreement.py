"""Agrees, before a pipeline is set up, on the name of the run, its key and its processes.

This goes through the ranks' own connections, and not through the store, to which others may write.
"""

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pipeplan.runtime.supervision.ending import print_line
from pipeplan.runtime.supervision.launch_secret import (
    SecretError,
    derive_key,
    find_secret,
    proof_of,
)
from pipeplan.runtime.supervision.processes import Process

__all__ = ["Run", "agree_on_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the ranks of one pipeline share."""

    name: str
    """No other pipeline has it."""
    key: bytes
    """Signs what ranks tell through the store; empty if the run is unprotected."""
    processes: list[Process]
    """By rank."""


def agree_on_run() -> Run:
    """The same run on all ranks; rank 0 says in one line if they share no secret."""
    secret, problem = b"", ""
    try:
        secret = find_secret()
    except SecretError as error:
        problem = str(error)
    everyone = _gather((uuid.uuid4().hex, Process.this_one().to_json()))
    name = hashlib.sha256("".join(word for word, _ in everyone).encode()).hexdigest()[:32]
    proofs = _gather(proof_of(secret, name) if secret else "")
    processes = [Process.from_json(text) for _, text in everyone]
    is_shared = bool(secret) and set(proofs) == {proof_of(secret, name)}
    if not is_shared and dist.get_rank() == 0:
        others = [rank for rank, proof in enumerate(proofs) if proof != proofs[0]]
        problem = problem or f"rank {others[0]} has another secret than rank 0"
        print_line(
            f"this run is unprotected: {problem}; whoever reaches the store's port can end it;"
            " set PIPEPLAN_SECRET to the same value on all hosts"
        )
    return Run(name=name, key=derive_key(secret, name) if is_shared else b"", processes=processes)


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
