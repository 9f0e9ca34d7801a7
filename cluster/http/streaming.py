"""One request being generated: its choices side by side, read as batches of what has become certain.

Knows the generator and the choices, no API shape and no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from cluster.gateway.merged_streams import fanout
from cluster.http.api import Api
from cluster.http.openai.choice import Choice, Delta
from cluster.http.parse import Job
from cluster.metrics.requests import RequestTimeline
from cluster.slo.terms import RequestTerms
from kv_transfer.messages.requests import TokenEvent


class Generation:
    """Runs the sequences of a job."""

    def __init__(self, job: Job, api: Api, terms: RequestTerms, timeline: RequestTimeline) -> None:
        self._api = api
        self._timeline = timeline
        self.terms = terms
        self.watch = api.slo.watch(terms, len(job.specs))
        self.job = job
        text_ends = [api.tokenizer.text_end(prompt.token_ids) for prompt in job.prompts]  # once for all its choices
        self.choices = [
            Choice(
                api.tokenizer,
                text_ends[index // job.num_choices],
                spec.params,
                job.stop,
                return_token_ids=job.return_token_ids,
            )
            for index, spec in enumerate(job.specs)
        ]

    async def batches(self) -> AsyncGenerator[dict[int, Delta], None]:
        """What has become certain, by choice; several tokens that arrived together are one delta.

        Raises GenerationError. Closing it closes every sequence on every worker.
        """
        remaining = len(self.choices)
        watches = self.watch.sequences
        streams = [
            self._api.generator.generate(spec, self.terms, watch.journey)
            for spec, watch in zip(self.job.specs, watches, strict=True)
        ]
        async with fanout(streams) as reader:
            while remaining:
                batch: dict[int, Delta] = {}
                for index, (at, event) in await reader.next():
                    watches[index].token(at)
                    choice = self.choices[index]
                    if choice.finish_reason is not None:
                        continue  # arrived together with, but after, the end of a stop string
                    delta = self._delta(choice, event)
                    if (earlier := batch.setdefault(index, delta)) is not delta:
                        earlier.merge(delta)
                    if delta.finish_reason is not None:
                        remaining -= 1
                        if event.finish_reason is None:
                            reader.close(index)
                self._timeline.token()
                yield batch

    def _delta(self, choice: Choice, event: TokenEvent) -> Delta:
        delta = choice.append(event)
        return Delta(finish_reason="length") if self.job.discard_output else delta

    @property
    def num_generated_tokens(self) -> int:
        return 0 if self.job.discard_output else sum(choice.num_tokens for choice in self.choices)

    @property
    def num_steps(self) -> int:
        """Tokens of the longest choice."""
        return max(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache; a prompt with several choices counts once."""
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.job.num_choices])

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        num_prompt, num_generated = self.job.num_prompt_tokens, self.num_generated_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
