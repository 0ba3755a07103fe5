"""Runs an example script as `python` would, launched by `test_distributed`."""

import runpy
import sys
from pathlib import Path

from .distributed_support import leave, start


if __name__ == "__main__":
    start()
    del sys.argv[0]
    sys.path.append(str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
