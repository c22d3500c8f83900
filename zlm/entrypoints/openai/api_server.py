"""``python -m zlm.entrypoints.openai.api_server --model M ...``: where old guides start a server.

It says the command of today, and is it.
"""

import sys

from zlm.cli.main import main

if __name__ == "__main__":
    print("zlm: the command for this is zlm serve MODEL, with the same flags", file=sys.stderr)
    sys.exit(main(["serve", *sys.argv[1:]]))
