"""State of one layer on one worker: weights, moments, gradient and version, whole or a share.

The state is one flat tensor, so that it moves as one message. The gradient, this worker's own sum
over micro-batches, is another (`layout` defines the order of numbers). An update applies the
reduced gradients, which are summed over all workers. Must not know other layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from oobleck.core.instructions import LayerPart
from oobleck.core.routes import Shard
from oobleck.worker.models.base import Layer
from oobleck.worker.state.layout import Layout, Numbers
from oobleck.worker.state.optimizer import Apart, Slice


@dataclass(slots=True, kw_only=True)
class LayerState:
    """State of a layer on this worker, or of the worker's share of it."""

    shard: Shard
    layout: Layout
    #: If the layer is whole, its parameters are views into `storage` and `gradient`. Those of a
    #: share have no memory here (`oobleck.worker.step.exchange` assigns some).
    module: Layer
    #: (1 + moments, n): weights, then the optimizer's moments: AdamW's exp_avg and exp_avg_sq;
    #: SGD's momentum_buffer, if it has momentum. The n numbers are the tied part's, then the own
    #: part's.
    storage: Tensor
    #: (n): weights in the type that the layer computes with; None: the type of `storage`.
    narrow: Tensor | None = None
    #: (n): sum over micro-batches.
    gradient: Tensor
    #: Micro-batches of the step that are completely in `gradient`.
    added: set[int] = field(default_factory=set)
    #: Views of `gradient` by parameter, if a step may leave some out; empty for a share.
    gradients: tuple[Tensor, ...] = ()
    #: Layout indices of parameters with a gradient in the step that `gradients` do not show.
    noted: set[int] = field(default_factory=set)
    #: Gradients that the update applies and scales in place; for missing parts it uses `gradient`.
    reduced: dict[LayerPart, Tensor] = field(default_factory=dict)
    #: Number of steps applied.
    version: int
    #: Which of the layer's numbers are here, of the tied part and of the own part.
    numbers: Numbers = field(init=False)
    #: Version of `narrow`; None: not computed yet.
    _narrowed: int | None = field(init=False, default=None)
    #: Versions of `gradients` at the start of the step.
    _versions: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = self.layout.shard(self.shard)
        self._versions = [one._version for one in self.gradients]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that occupy its memory."""
        narrow = () if self.narrow is None else (self.narrow,)
        return (self.storage, self.gradient, *narrow)

    def computed(self) -> Tensor:
        """Return the weights to compute with (n).

        If they are a narrow copy, it is refreshed once per version; only updates change the
        original.
        """
        if self.narrow is None:
            return self.storage[0]
        if self._narrowed != self.version:
            self.narrow.copy_(self.storage[0])
            self._narrowed = self.version
        return self.narrow

    def clear_gradient(self) -> None:
        """Zero the gradient and forget the micro-batches added to it."""
        self.gradient.zero_()
        self.added.clear()
        self.noted.clear()
        self._versions = [one._version for one in self.gradients]

    def used(self) -> set[int]:
        """Return the layout indices of parameters that got a gradient in the step."""
        versions = zip(self.gradients, self._versions, strict=True)
        return self.noted | {n for n, (one, was) in enumerate(versions) if one._version != was}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights; see `ModelState.weights`."""
        spans = {span.name: span for span in self.layout.parameters}
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.trained():
            span = spans[names[id(parameter)]]
            yield name, self.storage[0, span.offset : span.end].view(span.shape)

    def columns(self, numbers: range) -> slice:
        """Return the columns of `storage` and `gradient` for the held ones of `numbers`.

        All `numbers` are of one part.
        """
        tied, own = self.numbers
        for held, offset in ((tied, 0), (own, len(tied))):
            start, stop = max(held.start, numbers.start), min(held.stop, numbers.stop)
            if start < stop:
                return slice(start - held.start + offset, stop - held.start + offset)
        return slice(0, 0)

    def copy_to(self, numbers: Numbers, into: Tensor) -> None:
        """Copy the held ones of `numbers` to their columns in `into`, which has room for all."""
        offset = 0
        for wanted, held in zip(numbers, self.numbers, strict=True):
            both = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            if both:
                begin = offset + both.start - wanted.start
                into[:, begin : begin + len(both)] = self.storage[:, self.columns(both)]
            offset += len(wanted)

    def applied(self) -> Iterator[tuple[range, Tensor]]:
        """Yield ranges of numbers, each with the gradient that the update applies to it."""
        pieces = sorted(
            ((self.layout.part(part), reduced) for part, reduced in self.reduced.items()),
            key=lambda piece: piece[0].start,
        )
        for held in self.numbers:
            reached = held.start
            for numbers, reduced in pieces:
                if numbers.start not in held:
                    continue
                if reached < numbers.start:
                    before = range(reached, numbers.start)
                    yield before, self.gradient[self.columns(before)]
                yield numbers, reduced
                reached = numbers.stop
            if reached < held.stop:
                rest = range(reached, held.stop)
                yield rest, self.gradient[self.columns(rest)]

    def slices(self, apart: Sequence[Apart] = ()) -> Iterator[Slice]:
        """Yield the tensors that the optimizer updates. `apart`: in numbers of the layer.

        Each part, and each piece that others hold in other cuts, is a tensor of its own: vectorised
        kernels round the ends of a tensor differently from its middle, and all copies of a weight
        must stay equal bit for bit (see `CUT_NUMBERS`).
        """
        for numbers, gradient in self.applied():
            yield from self.slices_of(numbers, gradient, apart)

    def slices_of(
        self, numbers: range, gradient: Tensor, apart: Sequence[Apart] = ()
    ) -> Iterator[Slice]:
        """Yield the tensors for `numbers`, all of one part, to which `gradient` is applied."""
        flat = self.layout
        for start, end, decayed in (
            (0, flat.tied_decayed, True),
            (flat.tied_decayed, flat.tied, False),
            (flat.tied, flat.decayed, True),
            (flat.decayed, flat.size, False),
        ):
            both = range(max(start, numbers.start), min(end, numbers.stop))
            if both:
                offset = both.start - numbers.start
                yield Slice(
                    storage=self.storage[:, self.columns(both)],
                    gradient=gradient[offset : offset + len(both)],
                    decayed=decayed,
                    apart=tuple(
                        replace(one, numbers=_shifted(common, -both.start))
                        for one in apart
                        if (common := _common(one.numbers, both))
                    ),
                )

    def gradient_of(self, wanted: Numbers, into: Tensor) -> None:
        """Write the gradient to be applied to `wanted`, all held here, into `into`, flat."""
        offset = 0
        for numbers in wanted:
            for applied, gradient in self.applied():
                both = range(max(applied.start, numbers.start), min(applied.stop, numbers.stop))
                if both:
                    begin, first = offset + both.start - numbers.start, both.start - applied.start
                    into[begin : begin + len(both)] = gradient[first : first + len(both)]
            offset += len(numbers)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _shifted(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)
