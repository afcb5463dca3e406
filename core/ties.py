"""Groups of layers that share parameters, whose gradients are summed over the holders of all."""

#: True: the last layer shares with the first one, as the head does with the token embedding. Else
#: the groups, each in ascending order; no layer is in two.
Ties = bool | tuple[tuple[int, ...], ...]


def groups(ties: Ties, layer_count: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of layers that share parameters, in a model of so many layers."""
    if isinstance(ties, bool):
        return (tuple(sorted({0, layer_count - 1})),) if ties else ()
    return ties
