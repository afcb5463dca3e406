"""The assignment problem: who takes which place so that the total gain is greatest."""

from collections.abc import Sequence


def best_assignment(gains: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each row the column it gets, each column once, with the greatest sum of gains.

    `gains` has at most as many rows as columns. The Hungarian algorithm with potentials, in
    O(rows^2 * columns); rows are placed in order and columns tried in order, so that the result is
    the same everywhere.
    """
    columns = len(gains[0]) if gains else 0
    if len(gains) > columns:
        raise ValueError(f"{len(gains)} rows do not fit {columns} columns")
    row_price = [0] * len(gains)
    column_price = [0] * columns
    row_of: list[int | None] = [None] * columns
    for new_row in range(len(gains)):
        # Dijkstra from the new row over reduced costs, to the nearest free column.
        distance: list[int | None] = [None] * columns
        previous: list[int | None] = [None] * columns
        settled: list[int] = []
        open_columns = list(range(columns))
        row, column, reached = new_row, None, 0
        while True:
            for other in open_columns:
                cost = reached - gains[row][other] - row_price[row] - column_price[other]
                known = distance[other]
                if known is None or cost < known:
                    distance[other], previous[other] = cost, column
            column = min(open_columns, key=lambda c: _known(distance[c]))
            reached = _known(distance[column])
            open_columns.remove(column)
            settled.append(column)
            owner = row_of[column]
            if owner is None:
                break
            row = owner
        row_price[new_row] += reached
        for other in settled:
            slack = reached - _known(distance[other])
            column_price[other] -= slack
            holder = row_of[other]
            if holder is not None:
                row_price[holder] += slack
        while column is not None:  # hand the columns on along the path
            before = previous[column]
            row_of[column] = new_row if before is None else row_of[before]
            column = before
    result = [0] * len(gains)
    for index, holder in enumerate(row_of):
        if holder is not None:
            result[holder] = index
    return tuple(result)


def _known(value: int | None) -> int:
    assert value is not None
    return value
