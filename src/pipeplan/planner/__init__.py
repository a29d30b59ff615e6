"""Our planners: one algorithm a file. `pipeplan.planning` is the door to them."""
