"""From what a user calls a model to a local path: a folder, a GGUF file, or a Hugging Face id.

An existing path always wins over an id. Something that can only be a path and does not exist is
told as such at once, with the nearest name beside it, and not looked up in the network. No torch.
"""

import difflib
import re
from collections.abc import Callable
from pathlib import Path

from zlm.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?", re.ASCII)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    report: Callable[[str], None] | None = None,
) -> str:
    """Return the local folder or GGUF file that *model* means, downloading what is missing.

    model: a folder, a .gguf file, a folder with one .gguf file, a Hugging Face id, or an id with a
    GGUF file or quantization after a colon (``owner/name:Q4_K_M``).
    revision: branch, tag or commit of an id.  download_dir: where downloads are kept; None: the
    Hugging Face cache.  report: is told in words how far a download is; None: bars on stderr show
    it.  The token is taken from HF_TOKEN or HUGGINGFACE_HUB_TOKEN.
    Raises ModelError, in words for the user, if there is no such model or it cannot be had.
    """
    local = _local_path(model)
    if local is not None:
        return str(_checkpoint_in(local))
    from zlm.weights import hub  # imports huggingface_hub, which takes a while

    return str(hub.download_model(model, revision, download_dir, report))


def resolve_tokenizer(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> str:
    """Return a local path to take the tokenizer from; like resolve_model, but without weights."""
    local = _local_path(model)
    if local is not None:
        has_tokenizer = local.is_dir() and any(local.glob("tokenizer*"))
        return str(local if has_tokenizer else _checkpoint_in(local))
    from zlm.weights import hub

    return str(hub.download_small_files(model, revision, download_dir))


def resolve_description(
    model: str, *, revision: str | None = None, download_dir: str | None = None
) -> str:
    """Return a local path to read the facts of *model* from; of an id only small files are fetched.

    Like resolve_model, but weights may be missing, unless they are a GGUF file, which holds both.
    """
    local = _local_path(model)
    if local is not None:
        return str(_checkpoint_in(local))
    from zlm.weights import hub

    return str(hub.download_small_files(model, revision, download_dir))


def _local_path(model: str) -> Path | None:
    """Return *model* as an existing path, None if it can only be an id."""
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    is_path = model.startswith(("/", "./", "../", "~")) or model.endswith("/")
    if is_path or (model.endswith(".gguf") and ":" not in model) or model.count("/") > 1:
        raise ModelError(f"there is no file or folder {model}{similar_path(path)}")
    if not _HUB_ID.fullmatch(model):
        raise ModelError(f"{model!r} is neither an existing path nor a Hugging Face id")
    return None


def similar_path(path: Path) -> str:
    """Return a hint at what stands beside *path* under a similar name, or an empty string."""
    parent = path.parent
    if not parent.is_dir():
        return f": there is no folder {parent} either" if str(parent) != "." else ""
    names = [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(path.name, names, 1, 0.7)
    return f" (did you mean {parent / close[0]}?)" if close else ""


def _checkpoint_in(path: Path) -> Path:
    """Return the folder or file to load from *path*, which exists."""
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ModelError(f"{path} is a weights file: name the folder that holds it")
        return path
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds several GGUF files, name one of them: {names}")
    if (path / "snapshots").is_dir():
        raise ModelError(
            f"{path} belongs to a Hugging Face cache: name the model's id, with --download-dir "
            f"{path.parent} if that is not the usual cache"
        )
    return path  # without weights, as dummy weights need it; whoever reads it says what is missing
