"""All parts of a model at one microbatch size, timed in rounds.

A round goes over all atoms and the whole model in turn, so that a machine that becomes slower for a
while is slower for all of them. As in training, all forwards come first, and backwards in reverse:
a backward right behind its forward would find everything in the processor's caches, and take up to
a sixth less.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from pipeplan.measure.atoms import Atom, AtomParameters, Call, carry, make_atoms
from pipeplan.measure.bench import AtomBytes, AtomTimes, Bench
from pipeplan.splitting.layout import Layout

__all__ = ["Progress", "Session"]

Progress = Callable[[int, int], None]
"""Is told how many of all pieces of work are done."""

ENOUGH_S = 3.0
"""Rounds beyond the fewest begin only within this time."""


class Session:
    """All atoms of a model at one microbatch size."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        call: Call,
        bench: Bench,
        parameters: AtomParameters,
    ) -> None:
        self._model, self._layout, self._call, self._bench = model, layout, call, bench
        self._parameters = parameters
        self.num_runs = 0
        self.held: list[AtomBytes] = []
        self.times = [AtomTimes() for _ in layout.atoms]
        self.whole, self.nothing = AtomTimes(), AtomTimes()

    def run(self, num_runs: range, *, in_halves: bool, tell: Progress | None) -> None:
        """Find what atoms hold; then time them in rounds."""
        atoms = self._hold()
        is_estimate = num_runs.stop == 1
        if not is_estimate:  # the first round is cold
            warm = [AtomTimes() for _ in atoms]
            self._round(atoms, warm, in_halves=in_halves)
            self.whole, self.nothing = AtomTimes(), AtomTimes()
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            start_s = time.monotonic()
            while self.num_runs < num_runs.start or (
                self.num_runs < num_runs.stop and time.monotonic() - start_s < ENOUGH_S
            ):
                self._round(atoms, self.times, in_halves=in_halves)
                self.num_runs += 1
                if tell is not None:
                    tell(min(self.num_runs, num_runs.start), num_runs.start)
        finally:
            if collects:
                gc.enable()
        if not is_estimate:
            for times in self.times:
                times.forward_start_ms = self.nothing.forward
                times.backward_start_ms = self.nothing.backward

    def _hold(self) -> list[Atom]:
        atoms: list[Atom] = []
        output: Any = None
        for atom in make_atoms(self._model, self._layout, self._call, self._parameters):
            if atom.inputs is None:
                atom.inputs = output
            held, output = self._bench.hold(atom, is_last=len(atoms) == len(self.times) - 1)
            output = carry(output)
            atoms.append(atom)
            self.held.append(held)
        return atoms

    def _round(self, atoms: list[Atom], times: list[AtomTimes], *, in_halves: bool) -> None:
        last = len(atoms) - 1
        begun = [self._bench.begin(atom, is_last=i == last) for i, atom in enumerate(atoms)]
        for index in reversed(range(len(atoms))):
            self._bench.finish(atoms[index], begun.pop(), times[index])
        for index, atom in enumerate(atoms):
            if in_halves:
                self._bench.time_halves(atom, times[index], is_last=index == last)
        self._bench.time_whole(self._model, self._call, self.whole)
        self._bench.time_nothing(self.nothing)
