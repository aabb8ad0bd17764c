"""``python -m asyncsync`` is the ``asyncsync`` command."""

import sys

from asyncsync.cli import main

if __name__ == "__main__":
    sys.exit(main())
