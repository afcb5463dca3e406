"""What a simulated worker hears from its agent: the rules of `oobleck.worker.runtime.control`,
without its threads.
"""

import asyncio
from collections.abc import Callable

from oobleck.core.ids import Generation
from oobleck.core.messages import Assign, Measure
from oobleck.worker.runtime.errors import Superseded


class Ear:
    def __init__(self) -> None:
        self._abrupt: Assign | None = None
        self._boundaries: dict[Generation, Assign] = {}
        self._measure: Measure | None = None
        self._changed = asyncio.Event()
        self._on_abrupt: Callable[[], None] | None = None
        self._on_newer: Callable[[], None] | None = None
        self.save_wish = 0

    def accept(self, assign: Assign) -> None:
        generation = assign.plan.generation
        if assign.boundary:
            self._boundaries[generation] = assign
        elif self._abrupt is None or generation > self._abrupt.plan.generation:
            self._abrupt = assign
            self._boundaries = {g: a for g, a in self._boundaries.items() if g > generation}
            if self._on_abrupt is not None:
                self._on_abrupt()
        if self._on_newer is not None:
            self._on_newer()
        self._notify()

    def wish(self, measure: Measure) -> None:
        self._measure = measure
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def on_abrupt(self, act: Callable[[], None] | None) -> None:
        self._on_abrupt = act

    def on_newer(self, act: Callable[[], None] | None) -> None:
        self._on_newer = act

    def check_wanted(self, generation: Generation) -> None:
        if self._abrupt is not None and self._abrupt.plan.generation > generation:
            raise Superseded(self._abrupt.plan.generation)

    def check_newest(self, generation: Generation) -> None:
        newest = self._newest()
        if newest is not None and newest.plan.generation > generation:
            raise Superseded(newest.plan.generation)

    def pending_boundary(self, generation: Generation) -> Generation:
        """0: none."""
        newest = max(self._boundaries, default=generation)
        return newest if newest > generation else Generation(0)

    def boundary(self, generation: Generation) -> Assign:
        chosen = self._boundaries[generation]
        self._boundaries = {g: a for g, a in self._boundaries.items() if g > generation}
        return chosen

    def _newest(self) -> Assign | None:
        pushed = [*self._boundaries.values(), *([self._abrupt] if self._abrupt else [])]
        return max(pushed, key=lambda assign: assign.plan.generation, default=None)

    async def wait_next(self, generation: Generation) -> Assign:
        while True:
            changed = self._changed
            newest = self._newest()
            if newest is not None and newest.plan.generation > generation:
                return newest
            await changed.wait()

    async def wait_begin(self) -> Assign | Measure:
        while True:
            changed = self._changed
            if (newest := self._newest()) is not None:
                return newest
            if self._measure is not None:
                wish, self._measure = self._measure, None
                return wish
            await changed.wait()
