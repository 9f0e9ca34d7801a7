"""Embeddings, scores and ranks: the bodies that ask for them, and the shapes of the answers.

Embeddings as OpenAI has them, scores as vLLM, ranks as Jina, Cohere and vLLM. Scores are cosines: vectors have length
1.

Shape legend: N inputs, E vector size.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field

from cluster.http.openai.fields import Prompt, field_error, parse_prompts
from cluster.http.openai.schemas import INT64_MAX, ServedBody
from kv_transfer.messages.requests import RequestSpec

MAX_INPUTS: Final = 2048  # OpenAI's limit
MAX_NUMBERS: Final = 2**22  # in an answer, in which they are some 80 MB of JSON

Vectors = npt.NDArray[np.float32]


def _require_few(inputs: Sequence[Any]) -> None:
    if len(inputs) > MAX_INPUTS:
        raise field_error("invalid_value", f"{len(inputs)} were sent; at most {MAX_INPUTS} are possible")


def parse_inputs(value: object) -> list[Prompt]:
    """Normalise inputs to a list of prompts, as `parse_prompts` does. Refuses too many, empty ones and negative ids."""
    prompts = parse_prompts(value)
    _require_few(prompts)
    if not all(prompts):
        raise field_error("invalid_value", "an input must not be empty; leave it out")
    if any(not isinstance(prompt, str) and min(prompt) < 0 for prompt in prompts):
        raise field_error("invalid_value", "token ids must be 0 or larger")
    return prompts


def parse_texts(value: object) -> list[str]:
    """Normalise a text, or a list of texts or of objects with a `text`, to a list of texts that are not empty."""
    values = value if isinstance(value, list) else [value]
    _require_few(values)
    texts: list[Any] = [
        item["text"] if isinstance(item, Mapping) and item.keys() == {"text"} else item for item in values
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise field_error("invalid_type", "send a text, or a list of texts or of objects such as {'text': 'hello'}")
    if not all(texts):
        raise field_error("invalid_value", "a text must not be empty; leave it out")
    return texts


_InputForms = str | list[str] | list[int] | list[list[int]]
_TextForms = str | list[str | dict[str, str]]
Inputs = Annotated[list[Prompt], BeforeValidator(parse_inputs, json_schema_input_type=_InputForms)]
Texts = Annotated[list[str], BeforeValidator(parse_texts, json_schema_input_type=_TextForms)]


class EmbeddingsBody(ServedBody):
    """`POST /v1/embeddings`"""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT64_MAX)


class ScoreBody(ServedBody):
    """`POST /v1/score`: scores each of `text_2` against its counterpart in `text_1`, or against the only one there."""

    text_1: Texts
    text_2: Texts


class RerankBody(ServedBody):
    """`POST /v1/rerank`: scores each document against the query, and ranks them, best first."""

    query: str = Field(min_length=1)
    documents: Texts
    top_n: int | None = Field(None, ge=0, le=INT64_MAX)
    return_documents: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingJob:
    """A request for vectors, scores or ranks as it is answered. `num_bytes`: about the size of the answer.
    `shape(job, vectors [N, E])` makes the answer."""

    id: str
    model: str
    specs: list[RequestSpec]
    shape: Callable[[PoolingJob, Vectors], dict[str, Any]]
    num_bytes: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_tokens(self) -> int:
        return sum(len(spec.prompt_token_ids) for spec in self.specs)

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


def embeddings_answer(job: PoolingJob, vectors: Vectors, body: EmbeddingsBody) -> dict[str, Any]:
    """The answer to a request for embeddings: OpenAI's `CreateEmbeddingResponse`."""
    vectors = shortened(vectors, body.dimensions)
    encode = _base64 if body.encoding_format == "base64" else _numbers
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": job.model,
        "usage": job.usage(),
    }


def score_answer(job: PoolingJob, vectors: Vectors, num_first: int) -> dict[str, Any]:
    """The answer to a request for scores, in vLLM's shape. The first `num_first` vectors are those of `text_1`."""
    scores = cosines(vectors[:num_first], vectors[num_first:])
    return {
        "id": job.id,
        "object": "list",
        "created": job.created,
        "model": job.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {**job.usage(), "completion_tokens": 0},
    }


def rerank_answer(job: PoolingJob, vectors: Vectors, body: RerankBody) -> dict[str, Any]:
    """The answer to a request for ranks, in Jina's and vLLM's shape, which Cohere's clients read. The first vector is
    that of the query. Documents with equal scores keep their order."""
    scores = cosines(vectors[:1], vectors[1:])
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
    if body.return_documents is not False:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    return {"id": job.id, "model": job.model, "results": results, "usage": job.usage()}


def shortened(vectors: Vectors, size: int | None) -> Vectors:
    """Cut vectors to their first `size` numbers, and give them length 1 again. `size` None: they stay whole."""
    if size is None or size >= vectors.shape[1]:
        return vectors
    first = vectors[:, :size].astype(np.float64)
    shorter: Vectors = (first / np.maximum(np.linalg.norm(first, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    return shorter


def cosines(first: Vectors, second: Vectors) -> list[float]:
    """The cosine of each vector of `second` with its counterpart in `first`, or with the only one there."""
    found: list[float] = (first.astype(np.float64) * second).sum(axis=1).clip(-1.0, 1.0).tolist()
    return found


def _numbers(vector: Vectors) -> object:
    return vector.tolist()


def _base64(vector: Vectors) -> object:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
