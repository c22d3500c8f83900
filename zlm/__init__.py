"""zlm: an LLM inference and serving engine for one GPU VM. The public names load lazily."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "PoolingParams", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from zlm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from zlm.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from zlm.sampling_params import StructuredOutputsParams

        return StructuredOutputsParams
    if name == "PoolingParams":
        from zlm.pooling_params import PoolingParams

        return PoolingParams
    raise AttributeError(f"module 'zlm' has no attribute {name!r}")
