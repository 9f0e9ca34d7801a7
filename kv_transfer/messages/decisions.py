"""What operators may ask the global scheduler about its decisions."""

from __future__ import annotations

from dataclasses import field
from typing import Final

from kv_transfer.messages.codec import Message, message
from kv_transfer.messages.fields import Count, Flag, Items, Text

MAX_DECISIONS: Final = 100  # in one answer: some 8 ms of the scheduler's time, in which it places nothing


@message
class AskDecisions(Message):
    """Gateway to scheduler: the newest `limit` decisions, at most `MAX_DECISIONS`. `ask_id` tells a gateway's questions
    apart."""

    ask_id: Count
    limit: Count
    as_text: Flag = False  # the tables that they were made from, for people


@message
class Decisions(Message):
    """Scheduler to gateway: newest first, each one line of JSON, or a table where that was asked for."""

    ask_id: Count
    decisions: Items[Text] = field(default_factory=list)
