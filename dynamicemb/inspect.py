"""Show what is in a dump: ``python -m dynamicemb.inspect PATH``."""

import sys

from dynamicemb.inspection.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
