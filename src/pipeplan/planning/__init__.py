"""From a model and a cluster to plans: all planners, one door to them, comparisons, sweeps."""
