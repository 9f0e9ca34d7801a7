"""What the tests of clients ask: the cluster that `make test-clients` serves, and what is asked of it.

A model of this size says little that is sensible, so nothing here depends on what it says: calls and answers are forced
by `tool_choice` and schemas, and judged by the clients' own types.
"""

from __future__ import annotations

import os
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

URL: Final = os.environ.get("LEGATO_URL", "http://127.0.0.1:8000")
MODEL: Final = "thinker"
KEY: Final = "unused"
QUESTION: Final = "What is the weather like in Rome?"
MAX_TOKENS: Final = 256
BUDGET: Final = 8  # tokens of reasoning
# Fields of a body by which it thinks: greedily, as a drawn first token closes the reasoning once in 200 answers.
THINKS: Final[dict[str, Any]] = {"thinking_token_budget": BUDGET, "temperature": 0}
TIMEOUT_S: Final = 120.0


class Weather(BaseModel):
    """Of a place, today, and nothing else: an answer that may go on with fields of its own need not end in time."""

    model_config = ConfigDict(extra="forbid")

    place: str = Field(max_length=20)
    sky: Literal["clear", "clouds", "rain"]
    degrees: int = Field(ge=-50, le=60)


PLACE: Final = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
