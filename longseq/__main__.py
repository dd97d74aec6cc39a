"""`python -m longseq` is the command `longseq`."""

import sys

from longseq.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
