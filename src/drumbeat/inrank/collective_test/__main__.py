"""`python …/collective_test/__main__.py`: run this folder as a package, wherever it was copied to."""

import importlib
import os
import sys

if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(folder)
    sys.exit(importlib.import_module(os.path.basename(folder) + ".main").main())
