"""Log lines: a constant message, then fields, one line per transition.

2026-01-02T03:04:05.678Z INFO master.loop node lost node=n3 reason="lease expired 5.2 s"
"""

import json
import logging
import sys
import time

from oobleck.core.redact import redact
from oobleck.host.display import inline, printable

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _value(value: object) -> str:
    text = redact(str(value))
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else inline(json.dumps(text))


class FieldFormatter(logging.Formatter):
    """Formatter that appends the fields passed as `extra=` to the message."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        source = record.name.removeprefix("oobleck.")
        fields = [f"{k}={_value(v)}" for k, v in vars(record).items() if k not in _STANDARD]
        head = f"{moment}.{record.msecs:03.0f}Z {record.levelname} {source} "
        head += inline(record.getMessage())
        line = " ".join([head, *fields])
        if record.exc_info:
            line += "\n" + printable(self.formatException(record.exc_info))
        return line


def configure() -> None:
    """Send all log lines of this process to its standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FieldFormatter())
    logging.basicConfig(level="INFO", handlers=[handler], force=True)
