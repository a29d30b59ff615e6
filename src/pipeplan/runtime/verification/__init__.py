"""Compares, before the first step, each stage with the whole model; see `stage_comparison`."""
