"""The memory of a plan with groups, walked block by block in plain Python, for the checker."""

from pipeplan.pipeline import Kind, Plan

__all__ = ["group_memory_gb"]

BYTES_IN_GB = 1e9


def group_memory_gb(plan: Plan) -> list[dict[int, float]]:
    """For each group what each of its devices needs at most."""
    q = plan.model.optimizer_bytes_per_parameter_byte
    needs = []
    for number, group in enumerate(plan.groups):
        parameters = sum(
            plan.model.layers[layer].parameter_bytes
            for index in group.stages
            for layer in plan.stages[index].layers
        )
        k = len(group.devices)
        kept = min(q, 1.0) + max(0.0, q - 1.0) / k if plan.shard_optimizer else q
        held = _most_held(plan, number)
        first = plan.stages[group.stages[0]]
        needs.append(
            {
                device: (parameters * (1 + kept) + held * share) / BYTES_IN_GB
                for device, share in zip(first.devices, first.device_shares, strict=True)
            }
        )
    return needs


def _most_held(plan: Plan, group: int) -> float:
    """The most bytes of whole microbatches that a group holds at once."""
    sizes: dict[int, tuple[float, float, float, bool]] = {}
    for index in plan.groups[group].stages:
        stage = plan.stages[index]
        layers = [plan.model.layers[n] for n in stage.layers]
        activation = sum(layer.activation_bytes for layer in layers)
        weight = sum(layer.weight_grad_bytes for layer in layers)
        before = stage.layers[0] - 1
        into = plan.model.input_bytes if before < 0 else plan.model.layers[before].output_bytes
        sizes[index] = (
            into if stage.recompute else activation,
            weight,
            activation,
            stage.recompute,
        )
    held = most = 0.0
    for block in plan.schedule[group]:
        kept, weight, activation, recomputes = sizes[block.stage]
        if block.kind is Kind.FORWARD:
            held += kept
        computed = activation if recomputes and block.kind is not Kind.WEIGHT_GRADIENT else 0.0
        most = max(most, held + computed)
        if block.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            held -= kept
        if block.kind is Kind.INPUT_GRADIENT:
            held += weight
        if block.kind is Kind.WEIGHT_GRADIENT:
            held -= weight
        most = max(most, held)
    return most
