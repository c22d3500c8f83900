"""The real supervisor over fake processes: run as ``fake_server.py OPTIONS RESOLVER``.

OPTIONS is JSON of ServerOptions; RESOLVER is ``model``, ``error``, ``bug`` or ``never``.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from zlm.config import Config, ModelOptions, ModelSpec, Resolved, ServerOptions, resolve
from zlm.errors import ModelError
from zlm.process.logs import start_logging
from zlm.supervisor.main import serve

FAKE_ROLE = Path(__file__).with_name("fake_role.py")
SPEC = ModelSpec(
    architecture="llama",
    vocab_size=256,
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
)


def command(role: str) -> list[str]:
    return [sys.executable, "-P", str(FAKE_ROLE), role]


def resolver(config: Config, report: Callable[[str], None]) -> Resolved:
    report("downloading tiny-model: 35% of 5.0 GB")
    match sys.argv[2]:
        case "error":
            raise ModelError("tiny-model is neither a folder nor a file")
        case "bug":
            raise KeyError("hidden_size")
        case "never":
            time.sleep(600)
    return resolve(config, SPEC, model_path="/models/tiny", tokenizer_path="x", device="cpu")


if __name__ == "__main__":
    options = msgspec.json.decode(sys.argv[1], type=ServerOptions)
    config = Config(model=ModelOptions(model="tiny-model"), server=options)
    start_logging("supervisor")
    sys.exit(serve(config, command=command, resolver=resolver))
