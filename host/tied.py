"""Run a module as a process that ends with its parent from its first moment on.

    python -m oobleck.host.tied PARENT_PID MODULE [ARGUMENT...]

For modules whose own imports take seconds, in which the parent may die unnoticed. Must import
nothing that is slow.
"""

import runpy
import sys

from oobleck.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
