"""Published planners: one design a file, each loaded on its first use.

Each plans with its own view of the cluster and its own objective. Then our simulator judges its
stages and its schedule on the real cluster.
"""

from importlib import import_module

from pipeplan.planning.problem import Draft, Planner, Problem

__all__ = ["BASELINES", "GROUP_BASELINES"]


def _on_first_use(module: str, function: str | None = None) -> Planner:
    def planner(problem: Problem) -> Draft:
        loaded = import_module(f"pipeplan.planning.baselines.{module}")
        draft: Draft = getattr(loaded, function or f"plan_{module}")(problem)
        return draft

    return planner


BASELINES: dict[str, Planner] = {
    "data-parallel": _on_first_use("data_parallel"),
    "gpipe": _on_first_use("gpipe"),
    "1f1b": _on_first_use("even_1f1b"),
    "grid": _on_first_use("grid"),
    "pipedream": _on_first_use("pipedream"),
    "dapple": _on_first_use("dapple"),
    "hetpipe": _on_first_use("hetpipe"),
    "piper": _on_first_use("piper"),
    "alpa": _on_first_use("alpa"),
    "interleaved-1f1b": _on_first_use("even_groups", "plan_interleaved"),
    "zb-h1": _on_first_use("even_groups", "plan_zb_h1"),
    "zb-v": _on_first_use("even_groups", "plan_zb_v"),
}
"""The planners by name."""

GROUP_BASELINES = ("interleaved-1f1b", "zb-h1", "zb-v")
"""Those whose devices have several stages, or whose backwards are cut in two."""
