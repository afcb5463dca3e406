"""Run a module as a process that ends with its parent from its first moment on.

    python -m oobleck.host.system.die_with_parent PARENT_PID MODULE [ARGUMENT...]

For modules whose imports take seconds. Without this the parent could die unnoticed meanwhile, and
Ctrl-C would leave a traceback in a log. Must import nothing that is slow.
"""

import runpy
import sys

from oobleck.host.system.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.exit(130)
