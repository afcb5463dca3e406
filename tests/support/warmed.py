"""The warm process of `support.director`: `python -m support.warmed LIMIT_S LINE`.

LIMIT_S: its workers' for each other's answer to a call. LINE: of Python; runs first.
"""

import sys

from oobleck.worker import warm
from oobleck.worker.transport.links import calls


def main() -> None:
    limit_s, before = sys.argv[1:]
    calls.ANSWER_LIMIT_S = float(limit_s)
    exec(before)
    warm.main()


if __name__ == "__main__":
    main()
