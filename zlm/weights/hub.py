"""Downloads from the Hugging Face hub, through huggingface_hub: cached, resumed, with a token.

Only what can be used is fetched: safetensors of the top folder, JSON, templates and tokenizers, and
the modules of an embedding model; no pickles and no second copies in other formats. A connection
that breaks is taken up where it broke; a start after a failure fetches the files that are missing.
When the hub cannot be reached, complete files in the cache serve (huggingface_hub checks that).
Every failure becomes a ModelError that says what to do.
"""

import errno
import os
import time
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from zlm.errors import ModelError
from zlm.weights import checksums
from zlm.weights.download_progress import Report, bar_class
from zlm.weights.resolve import similar_path

SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = ("*.safetensors",)
MODULES = "modules.json"  # a sentence-transformers pipeline: its modules are numbered folders
MODULE_FILES = ("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors")
# Subfolders hold other formats; Mistral's consolidated files repeat the weights; mmproj are eyes.
IGNORED = ("*/*", "consolidated*", "mmproj*")
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
)
CLOCK_SECONDS = 2.0  # by which a file system's times may differ from the clock
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGINGFACE_HUB_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def download_model(
    model: str, revision: str | None, download_dir: str | None, report: Report | None = None
) -> Path:
    """Return the local folder of the id *model*, or its GGUF file; see ``resolve_model``."""
    repository, _, choice = model.partition(":")
    source = _Source(repository, revision, download_dir, report)
    if choice:
        return _gguf_file(source, choice)
    folder = source.fetch((*SMALL_FILES, *WEIGHTS))
    if (folder / MODULES).is_file():
        source.fetch(MODULE_FILES, ignored=())
    if any(folder.glob("*.safetensors")):
        return folder
    local = [path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj")]
    if len(local) == 1:
        return local[0]
    names = source.names()
    files = [n for n in names if n.endswith(".gguf") and "/" not in n and "mmproj" not in n]
    if len(files) == 1:
        return _gguf_file(source, files[0])
    if files:
        raise ModelError(
            f"{repository} holds {len(files)} GGUF files, name one as {repository}:FILE: "
            + ", ".join(files)
        )
    others = [name for name in names if name.endswith((".bin", ".pth", ".pt", ".ckpt", ".h5"))]
    found = f", only {others[0]}: pickles are not loaded" if others else ""
    raise ModelError(f"{repository} holds no safetensors and no GGUF weights{found}")


def download_small_files(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return a local folder with the description and tokenizer of the id *model*, no weights."""
    repository, _, choice = model.partition(":")
    source = _Source(repository, revision, download_dir)
    return _gguf_file(source, choice) if choice else source.fetch(SMALL_FILES)


def _gguf_file(source: "_Source", choice: str) -> Path:
    """Fetch the GGUF file called *choice*, or whose name ends in that quantization."""
    if choice.endswith(".gguf"):
        patterns = [choice]
    else:
        patterns = [f"*{text}.gguf" for text in (choice, choice.lower(), choice.upper())]
    folder = source.fetch(tuple(patterns))
    found = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    found = [path for path in found if not path.name.startswith("mmproj")]
    if len(found) == 1:
        return found[0]
    there = ", ".join(name for name in source.names() if name.endswith(".gguf")) or "none"
    problem = "several GGUF files" if found else "no GGUF file"
    raise ModelError(f"{source.repository} holds {problem} {choice}; its GGUF files: {there}")


class _Source:
    """One repository at one revision, with the token and cache to use."""

    def __init__(
        self,
        repository: str,
        revision: str | None,
        download_dir: str | None,
        report: Report | None = None,
    ) -> None:
        self.repository = repository
        self.bar = None if report is None else bar_class(repository, report)
        self.revision = revision
        self.cache = str(Path(download_dir).expanduser()) if download_dir else None
        self.token = next((os.environ[k] for k in TOKEN_VARIABLES if os.environ.get(k)), None)

    def fetch(self, patterns: tuple[str, ...], ignored: tuple[str, ...] = IGNORED) -> Path:
        """Download the files that match *patterns* but not *ignored*; return their folder.

        What is new is compared with the hub's checksums.
        """
        began = time.time() - CLOCK_SECONDS
        try:
            folder = snapshot_download(
                self.repository,
                revision=self.revision,
                cache_dir=self.cache,
                token=self.token,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
                tqdm_class=self.bar,
            )
        except Exception as error:
            raise self.explain(error) from error
        checksums.check_new(Path(folder).rglob("*.*"), began)
        return Path(folder)

    def names(self) -> list[str]:
        """Return the names of all files in the repository."""
        try:
            return HfApi(token=self.token).list_repo_files(self.repository, revision=self.revision)
        except Exception as error:
            raise self.explain(error) from error

    def explain(self, error: Exception) -> ModelError:
        """Return what went wrong in words for the user.

        Network failures come in types that changed with every major version of huggingface_hub, so
        whatever is none of its own errors counts as one.
        """
        name, hub = self.repository, constants.ENDPOINT
        match error:
            case GatedRepoError():
                return ModelError(
                    f"{name} is gated: accept its terms at {hub}/{name}, make a read token at "
                    f"{hub}/settings/tokens, and set HF_TOKEN to it{self._token_note()}"
                )
            case RepositoryNotFoundError():
                return ModelError(
                    f"there is no model {name} at {hub}, or it is private and needs HF_TOKEN"
                    f"{self._token_note()}; nor is there a local file or folder of that name"
                    f"{similar_path(Path(name))}"
                )
            case RevisionNotFoundError():
                return ModelError(f"{name} has no revision {self.revision}")
            case HFValidationError():
                return ModelError(f"{name!r} is no Hugging Face id: {error}")
            case LocalEntryNotFoundError():
                return ModelError(
                    f"{name} is not complete in {self.cache or constants.HF_HUB_CACHE}, and {hub} "
                    f"cannot be reached: {_first_line(error.__cause__ or error)}"
                )
            case HfHubHTTPError():
                return ModelError(f"{hub} refused {name}: {_first_line(error)}{self._token_note()}")
            case OSError() if error.errno in DISK_ERRORS:
                return ModelError(f"cannot store {name}: {error.strerror} ({error.filename})")
        return ModelError(
            f"the download of {name} from {hub} broke off ({type(error).__name__}: "
            f"{_first_line(error)}); starting again fetches the files that are missing"
        )

    def _token_note(self) -> str:
        return " (the token in use has no access)" if self.token else " (no token is set)"


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
