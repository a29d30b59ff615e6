"""From the measured atoms of a model to the layers of its profile."""

from collections.abc import Callable, Iterator

from pipeplan.measure.atoms import AtomParameters
from pipeplan.measure.bench import AtomBytes, AtomTimes
from pipeplan.measure.results import ModelMeasurement
from pipeplan.measure.sessions import Session
from pipeplan.profile import LayerProfile, ModelProfile, TimesAt
from pipeplan.splitting.layout import Layout

__all__ = ["merge_layers"]

TIME_DIGITS = 6
"""Files hold no times below 1e-6 ms."""


def merge_layers(
    runs: list[Session],
    sizes: list[int],
    layout: Layout,
    *,
    name: str,
    input_bytes: float,
    parameters: AtomParameters,
    device: str,
    is_estimate: bool,
) -> ModelMeasurement:
    """The profile of a model from its sessions; the first one counts, others are times at `at`."""
    first = runs[0]
    layers = []
    for layer, layer_name in enumerate(layout.names):
        atoms = layout.atoms_of[layer]
        at = tuple(
            TimesAt(
                microbatch_size=size,
                forward_ms=_sum(run.times[atom].forward for atom in atoms),
                backward_ms=_sum(run.times[atom].backward for atom in atoms),
            )
            for size, run in zip(sizes[1:], runs[1:], strict=True)
        )
        layers.append(_merge(layer_name, [(first.held[a], first.times[a]) for a in atoms], at))

    def each(figure: Callable[[AtomTimes], float]) -> tuple[float, ...]:
        return tuple(
            sum((figure(first.times[atom]) for atom in atoms), 0.0) for atoms in layout.atoms_of
        )

    return ModelMeasurement(
        profile=ModelProfile(
            name=name,
            microbatch_size=sizes[0],
            input_bytes=input_bytes,
            layers=tuple(layers),
            tied=_tied(layout, parameters),
        ),
        whole_forward_ms=first.whole.forward,
        whole_backward_ms=first.whole.backward,
        spreads=tuple(
            max((first.times[atom].spread for atom in atoms), default=0.0)
            for atoms in layout.atoms_of
        ),
        num_runs=first.num_runs,
        device=device,
        is_estimate=is_estimate,
        forward_flops=each(lambda times: times.forward_flops),
        backward_flops=each(lambda times: times.backward_flops),
    )


def _sum(values: Iterator[float]) -> float:
    return round(sum(values), TIME_DIGITS)


def _merge(
    name: str, atoms: list[tuple[AtomBytes, AtomTimes]], at: tuple[TimesAt, ...]
) -> LayerProfile:
    """A layer of several atoms, or of none: their sum, with the output of the last."""
    held = [each for each, _ in atoms]
    times = [each for _, each in atoms]
    backward_ms = _sum(each.backward for each in times)
    weight_grad_ms = _sum(each.weight_grad for each in times)
    return LayerProfile(
        name=name,
        forward_ms=_sum(each.forward for each in times),
        backward_ms=backward_ms,
        output_bytes=float(held[-1].output_bytes) if held else 0.0,
        gradient_bytes=float(held[-1].gradient_bytes) if held else 0.0,
        parameter_bytes=float(sum(each.parameter_bytes for each in held)),
        activation_bytes=float(sum(each.activation_bytes for each in held)),
        weight_grad_ms=min(weight_grad_ms, backward_ms),
        weight_grad_bytes=float(sum(each.weight_grad_bytes for each in held)),
        at=at,
    )


def _tied(layout: Layout, parameters: AtomParameters) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that share a parameter, in the order of the model."""
    layer_of = {atom: layer for layer, atoms in enumerate(layout.atoms_of) for atom in atoms}
    sharing: dict[int, dict[int, None]] = {}
    for atom, own in enumerate(parameters):
        for parameter in own:
            sharing.setdefault(id(parameter), {})[layer_of[atom]] = None
    groups = dict.fromkeys(tuple(found) for found in sharing.values() if len(found) > 1)
    return tuple(tuple(layout.names[layer] for layer in group) for group in groups)
