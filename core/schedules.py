"""Names of the pipeline schedules; their orders of compute are in
`oobleck.planner.programs.compiler.schedule`."""

from typing import Literal

#: Order of compute inside every stage: 1F1B (Narayanan et al., PipeDream-Flush), GPipe (all
#: forwards first), or ZB-H1 (Qi et al., zero bubble: weight gradients fill the bubbles).
Schedule = Literal["1f1b", "gpipe", "zb-h1"]
#: Ordered by preference: 1F1B keeps least and needs no split backward.
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "zb-h1", "gpipe")
