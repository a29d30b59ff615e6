"""From what a run really did to better inputs and a better plan; needs no torch."""

from pipeplan.calibration.door import Calibration, calibrate
from pipeplan.calibration.findings import Finding
from pipeplan.calibration.measured_run import MeasuredRun, Span, make_run, read_run

__all__ = ["Calibration", "Finding", "MeasuredRun", "Span", "calibrate", "make_run", "read_run"]
