"""Names of planners, schedules and export formats for help texts and completion.

The registries import numpy and the kernels, which a help text must not wait for. A test compares
these tuples with the registries.
"""

__all__ = ["EXPORT_FORMATS", "PLANNER_NAMES", "SCHEDULE_NAMES", "listed"]

PLANNER_NAMES = (
    "best",
    "spp",
    "exact",
    "data-parallel",
    "gpipe",
    "1f1b",
    "grid",
    "pipedream",
    "dapple",
    "hetpipe",
    "piper",
    "alpa",
    "interleaved-1f1b",
    "zb-h1",
    "zb-v",
)
SCHEDULE_NAMES = (
    "pe",
    "1f1b",
    "eager-1f1b",
    "gpipe",
    "backward-first",
    "capped-4",
    "capped-2",
    "interleaved-1f1b",
    "zb-h1",
    "zb-v",
    "v-half",
    "v-min",
)
EXPORT_FORMATS = (
    "torch-csv",
    "torchtitan",
    "megatron",
    "deepspeed",
    "chakra",
    "csv",
    "grid-plan",
    "chrome-trace",
)


def listed(names: tuple[str, ...]) -> str:
    """The names as a help text lists them."""
    return ", ".join(names)
