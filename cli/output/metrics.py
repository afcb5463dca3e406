"""Lines of metrics.jsonl and evaluations.jsonl as rows of a table, and as CSV. Pure."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
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
    """Format a record, or a range of lost ones, as a line below `head`.

    A wide line adds its time and the digest of its samples.
    """
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
