"""Plans synchronous pipeline-parallel training."""
