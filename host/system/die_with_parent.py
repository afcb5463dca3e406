"""Runner of a module's `main`, or of a package's `__main__`, in a process that ends with its
parent.

  python -m oobleck.host.system.die_with_parent PARENT_PID MODULE [ARGUMENT...]

For modules whose imports take seconds: the parent could die unnoticed meanwhile, and Ctrl-C would
leave a traceback in a log. Must import nothing that is slow.
"""

import sys
from importlib.util import find_spec

from oobleck.host.programs import run
from oobleck.host.system.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    found = find_spec(module)
    is_package = found is not None and found.submodule_search_locations is not None
    run(f"{module}.__main__" if is_package else module)
