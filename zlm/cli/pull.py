"""``zlm pull MODEL``: fetches a checkpoint from the hub, so that a later start needs no network."""

import argparse
import sys
from collections.abc import Sequence

from zlm.errors import ZlmError
from zlm.process.logs import escape


def main(words: Sequence[str]) -> int:
    """Run ``zlm pull`` with its arguments *words*; print where the model is, return the status."""
    parser = argparse.ArgumentParser(
        prog="zlm pull",
        description="Fetch a model into the Hugging Face cache and print its path.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="an id, or one with a GGUF file: owner/name:Q4_K_M"
    )
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--download-dir", metavar="FOLDER", help="where to keep it instead")
    options = parser.parse_args(list(words))
    from zlm.models.config import load_spec  # these take a while to import
    from zlm.weights.resolve import resolve_model

    try:
        path = resolve_model(
            options.model, revision=options.revision, download_dir=options.download_dir
        )
        load_spec(path)  # a model that cannot be served is told now
    except ZlmError as error:
        print(f"zlm pull: {escape(error.message)}", file=sys.stderr)
        return 1
    print(path)
    return 0
