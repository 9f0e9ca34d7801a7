"""What operators may ask the global scheduler about its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.messages.fields import STRICT, Count, Flag, Items, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDecisions:
    """Gateway to scheduler: the newest `limit` decisions. `ask_id` tells a gateway's questions apart."""

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
