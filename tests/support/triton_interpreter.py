"""Turns Triton's interpreter on for a test module, before it imports ``zlm.kernels``.

The interpreter of Triton 3.6 takes loop bounds by ``int(array of one element)``, which NumPy 2.4
refuses; ``enable`` makes it ask for the element.
"""

import os

import pytest
import torch


def enable() -> None:
    """Skip the calling module without Triton or with a GPU; else interpret what it imports."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the compiled kernels", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "takes_the_element", False):
        return

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    patched.takes_the_element = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched


def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products use few programs of many columns: no card is to be filled, each costs 3 ms."""
    from zlm.kernels import linear_small, quantized_vector

    def setting(device: str, N: int, K: int, *, gated: bool) -> tuple[int, int, int]:
        return 128, 1 << (K - 1).bit_length(), 4

    monkeypatch.setattr(linear_small, "vector_setting", setting)
    monkeypatch.setattr(quantized_vector, "PROGRAMS", 1)
