"""Where the checkout is, and a text in it that jobs of tests train on."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
#: The path of a text of 11 kB.
TEXT = str(ROOT / "LICENSE")
