"""The folder in which `auto` keeps what it measured and planned.

::

    folder/auto.json       for which model, ranks, hosts and wishes; written last
    folder/model.json      the profile
    folder/cluster.json    devices and links
    folder/plan.json       the plan

Two keys stand in `auto.json`: one for what was measured, one for the plan. Another batch or other
wishes need a new plan, but no new measurement.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeplan.cluster import Cluster
from pipeplan.documents.files import (
    read_cluster,
    read_model,
    read_plan,
    write_cluster,
    write_model,
    write_plan,
)
from pipeplan.documents.syntax import write_atomically
from pipeplan.errors import InputError
from pipeplan.pipeline import Plan
from pipeplan.profile import ModelProfile

__all__ = ["KeptInputs", "digest"]

FORMAT = "pipeplan.auto/1"


def digest(facts: Mapping[str, str]) -> str:
    """A text that is equal for equal facts."""
    text = json.dumps(dict(sorted(facts.items())))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


class KeptInputs:
    """One folder, read and written by rank 0."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def plan_path(self) -> Path:
        """Where the plan is."""
        return self.folder / "plan.json"

    def read_inputs(self, key: str) -> tuple[ModelProfile, Cluster] | None:
        """The profile and the cluster, if they were measured for this key."""
        if self._keys().get("measured") != key:
            return None
        with contextlib.suppress(InputError):  # damaged: measure again
            return (
                read_model(self.folder / "model.json"),
                read_cluster(self.folder / "cluster.json"),
            )
        return None

    def read_plan(self, measured_key: str, plan_key: str) -> Plan | None:
        """The plan, if it was made for these keys."""
        keys = self._keys()
        if (keys.get("measured"), keys.get("planned")) != (measured_key, plan_key):
            return None
        with contextlib.suppress(InputError):
            return read_plan(self.plan_path)
        return None

    def write(
        self,
        measured_key: str,
        plan_key: str,
        model: ModelProfile,
        cluster: Cluster,
        plan: Plan,
    ) -> None:
        """Keep all; while files change, the keys are gone."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._keys_path.unlink(missing_ok=True)
            write_model(model, self.folder / "model.json")
            write_cluster(cluster, self.folder / "cluster.json")
            write_plan(plan, self.plan_path)
            keys = {"format": FORMAT, "measured": measured_key, "planned": plan_key}
            write_atomically(self._keys_path, json.dumps(keys, indent=2).encode() + b"\n")
        except OSError as problem:
            raise InputError(
                f"folder: {str(self.folder)!r} cannot be written: {problem.strerror}; give auto a"
                " folder that rank 0 may write to"
            ) from None

    @property
    def _keys_path(self) -> Path:
        return self.folder / "auto.json"

    def _keys(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._keys_path.read_bytes())
            if isinstance(found, dict) and found.get("format") == FORMAT:
                return {name: text for name, text in found.items() if isinstance(text, str)}
        return {}
