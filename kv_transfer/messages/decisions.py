"""What operators may ask the global scheduler about its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kv_transfer.messages.fields import STRICT, Count, Flag, Items, Text

MAX_DECISIONS: Final = 100  # told at once: some 8 ms of the scheduler's time, in which it places nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDecisions:
    """Gateway to scheduler: the newest `limit` decisions, at most `MAX_DECISIONS`. `ask_id` tells a gateway's questions
    apart."""

    __pydantic_config__ = STRICT
    ask_id: Count
    limit: Count
    as_text: Flag = False  # the tables that they were made from, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Scheduler to gateway: newest first, each one line of JSON, or a table where that was asked for."""

    __pydantic_config__ = STRICT
    ask_id: Count
    decisions: Items[Text] = field(default_factory=list)
