"""The C++ kernels: plain arrays in, plain arrays out, the GIL released.

Each has a plain Python oracle in `tests/oracles.py` that says what it computes.
"""

from pipeplan._core._kernels import min_cut, partition, run_list, run_schedule

__all__ = ["min_cut", "partition", "run_list", "run_schedule"]
