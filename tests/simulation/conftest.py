"""Makes the words of the master's transcripts importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "master"))
