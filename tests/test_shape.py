"""The shape of the house: layers, sizes, docstrings, packaging."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 500
SOURCES = sorted([*ROOT.glob("zlm/**/*.py"), *ROOT.glob("kernels/*.py")])
TORCH_FREE = [
    "zlm", "zlm.config", "zlm.messages", "zlm.metrics", "zlm.ipc.sockets", "zlm.engine.process",
    "zlm.frontend.process", "zlm.tokenizer.process", "zlm.supervisor.main", "zlm.cli.main",
    "zlm.models.config", "zlm.weights.resolve", "zlm.weights.gguf",
]  # fmt: skip

# A package may import those of a smaller number; values anyone carries stand at the bottom.
LEVEL = {
    "errors": 0, "config": 1, "sampling_params": 1, "outputs": 1, "metrics": 1, "messages": 2,
    "api_keys": 1, "config_server": 1, "config_types": 1, "config_parallel": 1,
    "request_messages": 2,
    "pooling_params": 1, "unsupported": 1, "process_messages": 2, "scores": 2, "prompts": 1,
    "progress": 1,
    "ipc": 3, "process": 4, "kernels": 4, "ops": 5, "layers": 6, "weights": 7, "models": 7,
    "worker": 8, "engine": 9, "tokenizer": 10, "llm": 11, "offline": 11,
    "offline_pooling": 11, "offline_options": 11, "offline_calls": 11, "offline_text": 11,
    "beam_search": 11, "async_llm": 11, "frontend": 11,
    "supervisor": 11, "loadtest": 11, "cli": 12, "serve": 13, "__main__": 13,
    "entrypoints": 13,
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("zlm", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert all(alias.name != "*" for alias in node.names), f"{path}: star import"
            names.add(node.module or "")
    return names


def layer(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "zlm" and len(parts) > 1 else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = layer(module_name(path))
    if own is None:
        return  # zlm/__init__.py names its public classes lazily
    assert own in LEVEL, f"{path} is in no known layer"
    for name in imported_modules(path):
        other = layer(name)
        if other is not None and other != own:
            assert LEVEL[other] <= LEVEL[own], f"{path}: {own} must not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_sitting(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MOST_LINES, f"{path} has {lines} lines; does it still hold one concept?"
    if path.name == "__init__.py" and path.parent.name not in ("zlm", "kernels"):
        assert not text.strip(), f"{path} must be empty so that imports stay lazy"
    else:
        assert ast.get_docstring(ast.parse(text)), f"{path} has no module docstring"


def test_no_grab_bags() -> None:
    bad = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert not [p for p in SOURCES if p.name in bad]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module: str) -> None:
    block = "import sys\nfor n in ('torch', 'transformers', 'triton'): sys.modules[n] = None\n"
    subprocess.run([sys.executable, "-c", block + f"import {module}"], check=True)


def test_import_is_light() -> None:
    """``import zlm`` loads none of the packages that cost time; the commands' own test has them."""
    heavy = ("torch", "transformers", "zmq", "huggingface_hub", "tokenizers", "numpy", "uvloop")
    code = f"import zlm\nimport sys\nprint([n for n in {heavy} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_packages_are_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    assert listed == {module_name(path) for path in SOURCES if path.name == "__init__.py"}
    assert not [p for p in (ROOT / "kernels").iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert not (ROOT / "conftest.py").exists(), "a root conftest puts our kernels/ on sys.path"
    assert "--import-mode=importlib" in project["tool"]["pytest"]["ini_options"]["addopts"]


def test_wheel_holds_the_tree(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    expected = {"zlm/py.typed", "zlm/frontend/docs.html"}
    others = [*ROOT.glob("zlm/frontend/ui/*"), *ROOT.glob("kernels/cpu_*.[ch]")]
    for path in [*SOURCES, *others]:
        parts = path.relative_to(ROOT).parts
        expected.add("/".join(("zlm", *parts) if parts[0] == "kernels" else parts))
    assert packed == expected


@pytest.mark.parametrize(
    "name", ["bin/zlm-install", "bin/zlm-quickstart", "bin/zlm-test", ".ci/run"]
)
def test_commands_can_run(name: str) -> None:
    assert (ROOT / name).stat().st_mode & 0o111, f"{name} has no run bit"
