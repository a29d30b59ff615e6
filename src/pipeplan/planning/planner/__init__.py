"""Our planners: one algorithm a file. `pipeplan.planning.door` is the way to them."""
