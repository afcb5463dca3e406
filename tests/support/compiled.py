"""What every worker does in a step of each plan on standard input, by the release that runs this.

A plan is a line of JSON; its workers' programs are a line each. Imports nothing of the tests, since
the release before runs it too.
"""

import hashlib
import sys

from oobleck.core.codec import decode
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.own import compile_own, compile_own_evaluation


def main() -> None:
    for number, line in enumerate(sys.stdin):
        plan = decode(Plan, line)
        for worker in sorted(plan.workers):
            own = compile_own(plan, worker, tied=bool(number % 2))
            rounds = compile_own_evaluation(plan, plan.microbatches, worker)
            digest = hashlib.sha256(repr((own, rounds)).encode()).hexdigest()
            print(number, worker, len(own.program), digest)  # noqa: T201


if __name__ == "__main__":
    main()
