"""Line plot in characters, for terminals. Pure."""

import math
from collections.abc import Sequence
from itertools import pairwise

#: Dots of one braille character: two columns of four, and the bit of each.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


def plot(points: Sequence[tuple[int, float]], *, width: int, height: int = 12) -> str:
    """Plot `points`, sorted by x, at least one.

    The line passes through the mean of the points in each column of dots.
    """
    # Both labels are numbers of at most eleven characters.
    columns = max(2, width - 14)
    line = _line(points, 2 * columns)
    low, high = min(line), max(line)
    scale = (4 * height - 1) / (high - low) if high > low else 0.0
    dots = [round((high - y) * scale) for y in line]
    rows = [[_BLANK] * columns for _ in range(height)]
    for x, (before, dot) in enumerate(pairwise([dots[0], *dots])):
        # Fill steep parts, except for the dot in the previous column.
        steep = range(before + 1, dot) if before < dot else range(dot + 1, before)
        for y in (dot, *steep):
            rows[y // 4][x // 2] |= _BITS[x % 2][y % 4]
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    drawn = [
        f"{label:>11} ┤{''.join(map(chr, row)).rstrip(chr(_BLANK))}"
        for label, row in zip(labels, rows, strict=True)
    ]
    first, last = str(points[0][0]), str(points[-1][0])
    return "\n".join([*drawn, f"{'':13}{first}{last:>{max(2, columns - len(first))}}"])


def _line(points: Sequence[tuple[int, float]], columns: int) -> list[float]:
    """Return a height for each column of dots; columns without points are interpolated."""
    first, span = points[0][0], max(1, points[-1][0] - points[0][0])
    found: dict[int, list[float]] = {}
    for x, y in points:
        found.setdefault((x - first) * (columns - 1) // span, []).append(y)
    means = {column: math.fsum(ys) / len(ys) for column, ys in found.items()}
    line = [means[0]]
    for left, right in pairwise(means):
        step = (means[right] - means[left]) / (right - left)
        line += [means[left] + step * (x - left) for x in range(left + 1, right + 1)]
    return line
