"""Our planners: one algorithm a file. Call them through `pipeplan.planning.door`."""
