"""What pip-audit found, as a line for `make audit`: known vulnerabilities, or none.

    python tests/support/audit.py build/audit.json INDEX

An index of advisories knows only the versions of packages that pypi.org has. Others, such as those
of a mirror, are named and left out; if it knows none, nothing was looked up. Imports no more than
Python's own, since pip-audit has an environment to itself.
"""

import json
import sys
from pathlib import Path


def conclude(audit: str, index: str) -> tuple[bool, str]:
    """Return whether all is well, and the line that says so, of the text that pip-audit wrote."""
    pins = json.loads(audit)["dependencies"]
    unknown = [pin["name"] for pin in pins if "skip_reason" in pin]
    if found := {pin["name"]: pin["vulns"] for pin in pins if pin.get("vulns")}:
        told = (f"{name}: {', '.join(one['id'] for one in some)}" for name, some in found.items())
        return False, "known vulnerabilities: " + "; ".join(told)
    if len(unknown) == len(pins):
        return False, (
            f"the index of advisories ({index}) knows none of the {len(pins)} pins, so this tells "
            "nothing: run it where pypi.org answers itself, or with ADVISORIES=osv"
        )
    skipped = f"; not looked up, since {index} does not know them: {', '.join(unknown)}"
    return True, "no known vulnerability" + (skipped if unknown else "")


if __name__ == "__main__":
    is_well, line = conclude(Path(sys.argv[1]).read_text(), sys.argv[2])
    print(line, file=sys.stdout if is_well else sys.stderr)
    sys.exit(not is_well)
