"""Sweeps: plan every case of a grid, one row each; `running.sweep` is the function to call."""
