"""zlm: an LLM inference and serving engine for one GPU VM. The public names load lazily."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zlm.async_llm import AsyncLLM as AsyncLLM
    from zlm.llm import LLM as LLM
    from zlm.pooling_params import PoolingParams as PoolingParams
    from zlm.sampling_params import (
        BeamSearchParams as BeamSearchParams,
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
        StructuredOutputsParams as StructuredOutputsParams,
    )

__version__ = "0.1.0"
_HOMES = {  # of the public names
    "AsyncLLM": "zlm.async_llm",
    "LLM": "zlm.llm",
    "PoolingParams": "zlm.pooling_params",
    "BeamSearchParams": "zlm.sampling_params",
    "RequestOutputKind": "zlm.sampling_params",
    "SamplingParams": "zlm.sampling_params",
    "StructuredOutputsParams": "zlm.sampling_params",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zlm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
