"""A short name for the contents of a checkpoint, to tell whether two machines have the same one.

Reading all weights would take as long as loading them: of each file the size and SAMPLES pieces of
it count, spread evenly, so that another training of the same model is told apart.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from zlm.config import ModelOptions
from zlm.weights.safetensors import weight_files

SAMPLES = 16
SAMPLE_BYTES = 4096
DIGITS = 16


def fingerprint(model_path: str, options: ModelOptions) -> str:
    """Return the name of the checkpoint at *model_path*, a folder or a GGUF file.

    Weights do not count if *options* have them made up. Raises ModelError if they are not whole.
    """
    path = Path(model_path)
    digest = sha256()
    if path.is_dir():
        digest.update((path / "config.json").read_bytes())
    if options.load_format != "dummy":
        for file in weight_files(path)[0] if path.is_dir() else [path]:
            _sample(file, digest.update)
    return digest.hexdigest()[:DIGITS]


def _sample(file: Path, update: Callable[[bytes], None]) -> None:
    size = file.stat().st_size
    update(f"{size} ".encode())
    with file.open("rb") as content:
        for index in range(SAMPLES):
            content.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            update(content.read(SAMPLE_BYTES))
