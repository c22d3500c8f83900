"""``python -m zlm COMMAND ...``: the ``zlm`` command, with this Python."""

import sys

from zlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
