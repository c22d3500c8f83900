"""``zlm serve MODEL [flags]``: reads the flags, then becomes the supervisor."""

import logging
import sys
from collections.abc import Sequence

from zlm import __version__
from zlm.cli.arguments import changed
from zlm.cli.help import serve_help
from zlm.cli.hidden_arguments import hide_keys
from zlm.cli.parse import parse
from zlm.errors import ConfigError
from zlm.process.logs import escape, start_logging

USAGE_ERROR = 2

logger = logging.getLogger(__name__)


def main(words: Sequence[str]) -> int:
    """Run the command with its arguments *words*; return the exit status.

    0 when a signal ended the server, 1 when something failed, 2 for flags that are wrong.
    """
    before_end_of_flags = words[: words.index("--")] if "--" in words else words
    if "-h" in before_end_of_flags or "--help" in before_end_of_flags:
        print(serve_help())
        return 0
    num_hidden = hide_keys()
    try:
        config, notes = parse(words)
    except ConfigError as error:
        print(f"zlm serve: {escape(error.message)}", file=sys.stderr)
        print("zlm serve --help lists the flags", file=sys.stderr)
        return USAGE_ERROR
    from zlm.supervisor.main import serve  # its imports would slow --help down

    start_logging("supervisor", config.log.format)
    logger.info("zlm %s, model %s", __version__, config.model.model)
    if flags := changed(config):
        logger.info("flags: %s", ", ".join(flags))
    if num_hidden:
        logger.warning(
            "a key on the command line could be seen until now: better give it in a file, with "
            "--api-key-file, or in the environment, as ZLM_API_KEY or ZLM_ADMIN_API_KEY"
        )
    for note in notes:
        logger.warning("%s", note)
    return serve(config)
