"""From a model and a cluster to plans: one door, every planner behind it, comparisons, sweeps."""
