"""``python -m zlm.serve --model M ...``: the same as ``zlm serve M ...``."""

import sys

from zlm.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
