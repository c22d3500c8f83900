"""From a checkpoint's description to our ``ModelSpec``. No torch, no weights are read.

``load_spec`` takes a Hugging Face folder (``zlm.models.config_folder``) or a GGUF file
(``zlm.models.config_gguf``). What a family is computed like is said by the ModelSpec's fields
alone: models do not ask for the checkpoint's format or its configuration again.
"""

from pathlib import Path

from zlm.config import ModelSpec
from zlm.errors import ModelError
from zlm.models.config_folder import folder_spec
from zlm.models.config_gguf import gguf_spec


def load_spec(path: str | Path, *, generation_config: str = "auto") -> ModelSpec:
    """Return the facts of the checkpoint at *path*, a local folder or GGUF file.

    generation_config: where sampling defaults come from: ``auto`` is the checkpoint itself,
    ``none`` ignores them, anything else is a folder that holds a generation_config.json.
    Raises ModelError if the model is unknown, quantized in a way that is not supported, or
    incomplete; ConfigError if *generation_config* names nothing.
    """
    path = Path(path)
    if path.is_dir():
        return folder_spec(path, generation_config)
    if path.is_file():
        return gguf_spec(path, generation_config)
    raise ModelError(f"there is no model at {path}")
