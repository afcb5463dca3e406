"""Lines of metrics.jsonl and evaluations.jsonl as rows of a table, as CSV and as a plot. Pure."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from oobleck.cli.output.text import lost_records, moment
from oobleck.core.messages import StepRecord
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

#: Key, head and width of each column; fixed, because the table grows while it is shown.
_STEPS = (
    ("step", "STEP", 8),
    ("loss", "LOSS", 10),
    ("grad_norm", "GRAD NORM", 10),
    ("tokens", "TOKENS", 9),
    ("step_seconds", "SECONDS", 8),
    ("generation", "GENERATION", 10),
)
_EVALUATIONS = (
    ("step", "STEP", 8),
    ("loss", "LOSS", 10),
    ("perplexity", "PERPLEXITY", 10),
    ("samples", "SAMPLES", 8),
    ("seconds", "SECONDS", 8),
    ("generation", "GENERATION", 10),
)
#: Default values, which a line omits.
_USUAL: Mapping[str, object] = dict(
    zip(
        StepRecord.__struct_fields__[-len(StepRecord.__struct_defaults__) :],
        StepRecord.__struct_defaults__,
        strict=True,
    )
)


def head(*, evaluations: bool, wide: bool = False) -> str:
    line = "  ".join(f"{name:>{width}}" for _, name, width in _columns(evaluations))
    return f"{line}  {'TIME':<19}" + ("" if evaluations else "  SAMPLES") if wide else line


def row(record: Mapping[str, Any], *, evaluations: bool, wide: bool = False) -> str:
    """Format a record, or a range of lost ones, as a line below `head`. A wide line adds its time
    and the digest of its samples."""
    if "lost" in record:
        first, last = record["lost"]
        lost = pb.LostRecords(first_step=first, last_step=last)
        return inline(f"{'':>8}  {lost_records(lost)}: {record['why']}")
    line = "  ".join(
        f"{_cell(record.get(key)):>{width}}" for key, _, width in _columns(evaluations)
    )
    if wide:
        line = f"{line}  {moment(record['time'])}  {record.get('samples_digest', '')}".rstrip()
    return f"{line}  skipped" if record.get("skipped") else line


def _columns(evaluations: bool) -> Sequence[tuple[str, str, int]]:
    return _EVALUATIONS if evaluations else _STEPS


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"
        case _:
            return str(value)


def csv_keys(record: Mapping[str, Any], *, evaluations: bool) -> list[str]:
    """Return the columns of a CSV file with this first record."""
    return list(record) if evaluations else list(StepRecord.__struct_fields__)


def csv_line(cells: Sequence[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


def csv_cells(record: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return cells with numbers and words as in JSON; a missing value is empty."""
    values = (record.get(key, _USUAL.get(key)) for key in keys)
    return [
        "" if value is None else value if isinstance(value, str) else json.dumps(value)
        for value in values
    ]


# ---- a line plot in characters


#: Dots of one braille character: two columns of four, and the bit of each.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800


def plot(points: Sequence[tuple[int, float]], *, width: int, height: int = 12) -> str:
    """Plot `points`, sorted by x, at least one. The line passes through the mean of the points in
    each column of dots."""
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
