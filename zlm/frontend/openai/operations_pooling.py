"""The rows of /openapi.json for vectors and scores. Pure data."""

from zlm.frontend.openai.answer_types import (
    ClassificationList,
    EmbeddingList,
    PooledList,
    Ranking,
    ScoreList,
)
from zlm.frontend.openai.classify import ClassifyRequest
from zlm.frontend.openai.embeddings import FORMATS, EmbeddingRequest, PoolingRequest
from zlm.frontend.openai.field_schemas import MESSAGES
from zlm.frontend.openai.operation import ON_POST, PROMPT, Json, Operation
from zlm.frontend.openai.scoring import RerankRequest, ScoreRequest
from zlm.pooling_params import TASKS

_TAG = "Vectors and scores"
_NEEDS = "Served by embedding, scoring and classifying models."
_INPUT: dict[str, Json] = {
    "input": PROMPT,
    "messages": MESSAGES,
}
_FORMAT: dict[str, Json] = {
    "encoding_format": {"anyOf": [{"enum": list(FORMATS)}, {"type": "null"}]},
}
_TASK: dict[str, Json] = {"task": {"anyOf": [{"enum": list(TASKS)}, {"type": "null"}]}}
_TEXTS: Json = {"description": "Another name of text_2."}
_DOCUMENTS: Json = {"description": "The texts, or objects with a text.", "minItems": 1}
_SKY = ["The sky is blue.", "Paris is a city."]

POOLING = (
    Operation(
        path="/v1/embeddings",
        method="post",
        name="createEmbedding",
        tag=_TAG,
        summary="Vectors of texts",
        description=_NEEDS,
        request=EmbeddingRequest,
        alternatives=("input", "messages"),
        overrides=_INPUT | _FORMAT,
        examples={
            "text": {"input": "The sky is blue."},
            "base64": {"input": _SKY, "encoding_format": "base64"},
            "chat": {"messages": [{"role": "user", "content": "What colour is the sky?"}]},
        },
        answer=EmbeddingList,
        errors=ON_POST,
    ),
    Operation(
        path="/pooling",
        method="post",
        name="pool",
        tag=_TAG,
        summary="What the model pools, as it is; also of each token",
        description=_NEEDS,
        request=PoolingRequest,
        alternatives=("input", "messages"),
        overrides=_INPUT | _FORMAT | _TASK,
        examples={
            "text": {"input": "The sky is blue."},
            "tokens": {"input": "The sky is blue.", "task": "token_embed"},
        },
        answer=PooledList,
        errors=ON_POST,
    ),
    Operation(
        path="/classify",
        method="post",
        name="classify",
        tag=_TAG,
        summary="Which label fits a text",
        description="Served by models with a classification head.",
        request=ClassifyRequest,
        alternatives=("input", "messages"),
        overrides=_INPUT,
        examples={"text": {"input": "The sky is blue."}},
        answer=ClassificationList,
        errors=ON_POST,
    ),
    *(
        Operation(
            path=path,
            method="post",
            name=name,
            tag=_TAG,
            summary="How well pairs of texts match",
            description=_NEEDS,
            request=ScoreRequest,
            overrides={"documents": _TEXTS},
            examples={"one to many": {"text_1": "What colour is the sky?", "text_2": _SKY}},
            answer=ScoreList,
            errors=ON_POST,
        )
        for path, name in (("/score", "score"), ("/v1/score", "scoreV1"))
    ),
    *(
        Operation(
            path=path,
            method="post",
            name=name,
            tag=_TAG,
            summary="Documents in the order of their match with a query",
            description=_NEEDS,
            request=RerankRequest,
            required=("query", "documents"),
            overrides={"documents": _DOCUMENTS},
            examples={"two": {"query": "What colour is the sky?", "documents": _SKY}},
            answer=Ranking,
            errors=ON_POST,
        )
        for path, name in (
            ("/rerank", "rerank"),
            ("/v1/rerank", "rerankV1"),
            ("/v2/rerank", "rerankV2"),
        )
    ),
)
