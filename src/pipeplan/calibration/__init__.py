"""From what a run really did to better inputs and a better plan.

>>> from pipeplan.calibration.door import calibrate
>>> from pipeplan.calibration.measured_run import read_run
>>> found = calibrate(plan, read_run("trace.json", plan))
>>> print(found.findings, found.replanned)

This needs no torch.
"""
