"""Makes the helpers of the master's tests importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "master"))
