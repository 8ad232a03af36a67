"""Show what this machine has for the package, for a bug report: ``python -m dynamicemb.info``."""

import sys

from dynamicemb.environment import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
