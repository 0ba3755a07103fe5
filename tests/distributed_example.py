"""Runs an example script as `python` would, launched by `test_distributed`."""

import runpy
import sys

from .distributed_support import leave, start


if __name__ == "__main__":
    start()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
