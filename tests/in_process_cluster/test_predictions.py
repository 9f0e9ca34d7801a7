"""What a client predicts changes when tokens come, and no token: over HTTP, on real workers, of which one dies."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cluster.http.api import Api
from cluster.http.app import create_app
from decode_workers.worker import DecodeWorkerConfig
from engine.drafting.speculation import SpeculationConfig
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.workers import WorkerSnapshot
from tests.in_process_cluster.test_worker_metrics import Scraper
from tests.support.clusters.mini_cluster import MiniCluster, cluster_of
from tests.support.http_server import MODEL, scripted_api
from tests.support.small_models import SmallModel, greedy
from tests.support.waiting import eventually

LETTERS = "abcdefghijklmnopqrstuvwxyz "
NUM_TOKENS = 48


class Asking:
    """Completions of one prompt, by a client of the cluster's only gateway."""

    def __init__(self, cluster: MiniCluster, model: SmallModel) -> None:
        self.tokenizer = Tokenizer(model.folder)
        self.api: Api = scripted_api(cluster.orchestrator, self.tokenizer)
        self._app = create_app(self.api)

    async def __call__(self, prediction: str | None = None, **fields: Any) -> dict[str, Any]:
        """The choices, their usage, and the request's details. Only letters are sampled."""
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": "the sea is calm",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "seed": 7,
            "n": 2,
            "logprobs": 3,
            "allowed_token_ids": self.tokenizer.encode(LETTERS, add_special_tokens=False),
            **fields,
        }
        if prediction is not None:
            body["prediction"] = {"type": "content", "content": prediction}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://gateway") as http:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            if body.get("stream"):
                *_, last, done = answer.text.strip().split("\n\n")
                assert done == "data: [DONE]"
                return {"usage": json.loads(last.removeprefix("data: "))["usage"]}
            told: dict[str, Any] = answer.json()
            details = (await http.get(f"/cluster/requests/{told['id']}")).json()
        return {"choices": told["choices"], "usage": told["usage"], "details": details}


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Texts and ends are; log probabilities, as far as torch's kernels give the same to a sequence in other company."""
    for ours, theirs in zip(found["choices"], expected["choices"], strict=True):
        assert ours | {"logprobs": None} == theirs | {"logprobs": None}
        told, wanted = ours["logprobs"], theirs["logprobs"]
        assert (told["tokens"], told["text_offset"]) == (wanted["tokens"], wanted["text_offset"])
        assert told["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
        for top, best in zip(told["top_logprobs"], wanted["top_logprobs"], strict=True):
            assert top == pytest.approx(best, abs=1e-4)


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def guessing(fixed: int) -> DecodeWorkerConfig:
    return DecodeWorkerConfig(speculation=SpeculationConfig(drafters=("prediction",), fixed=fixed), heartbeat_s=0.02)


async def test_a_prediction_changes_no_token_and_is_counted(llama: SmallModel) -> None:
    async with cluster_of(llama, decode=guessing(3)) as cluster:
        ask = Asking(cluster, llama)
        plain = await ask()
        assert counted(plain["usage"]) == (0, 0) and plain["details"]["drafted_tokens"] == 0
        text = plain["choices"][0]["text"]
        edited = text[:20] + "zq" + text[22:]
        for prediction in (text, edited, "something else entirely, " * 3):
            predicted = await ask(prediction)
            require_same(predicted, plain)
            assert predicted["usage"]["completion_tokens"] == 2 * NUM_TOKENS, "rejected ones are none of them"
            accepted, rejected = counted(predicted["usage"])
            if prediction is not text:
                assert rejected > 0
            if prediction != "something else entirely, " * 3:
                assert accepted >= NUM_TOKENS / 2
            details = predicted["details"]
            assert (details["drafted_tokens"], details["accepted_tokens"]) == (accepted + rejected, accepted)
            of_choices = [choice["drafts"]["prediction"] for choice in details["of_choices"]]
            assert sum(drafts["accepted"] for drafts in of_choices) == accepted
        streamed = await ask(edited, stream=True, stream_options={"include_usage": True})
        assert counted(streamed["usage"]) == counted((await ask(edited))["usage"])

        metric = Scraper(cluster, cluster.decodes[0].info.worker_id)
        drafted = cluster.decodes[0].snapshot().drafts["prediction"]
        name = "legato_worker_draft_tokens_total"
        await metric.shows(drafted.num_accepted, name, drafter="prediction", outcome="accepted")
        await metric.shows(drafted.num_drafted - drafted.num_accepted, name, drafter="prediction", outcome="rejected")
        assert 1.0 < metric("legato_worker_tokens_per_step") < 4.0
        prefill = cluster.prefills[0].snapshot()
        assert prefill.drafts == {} and prefill.tokens_per_step == 1.0


async def test_without_speculation_a_prediction_is_not_looked_at(llama: SmallModel) -> None:
    async with cluster_of(llama, decode=DecodeWorkerConfig(speculation=None)) as cluster:
        ask = Asking(cluster, llama)
        plain = await ask()
        predicted = await ask(plain["choices"][0]["text"])
        require_same(predicted, plain)
        assert counted(predicted["usage"]) == (0, 0)
        snapshot: WorkerSnapshot = cluster.decodes[0].snapshot()
        assert snapshot.drafts == {} and snapshot.tokens_per_step == 1.0


async def test_a_prediction_goes_with_a_stream_that_goes_on_elsewhere(llama: SmallModel) -> None:
    """What both workers drafted is told of the request."""
    async with cluster_of(llama, num_prefill=0, num_decode=2, decode=guessing(2)) as cluster:
        await eventually(lambda: len(cluster.orchestrator.scheduler.workers) == 2)
        params = greedy(60)
        prompt = list(range(3, 40))
        expected = llama.local(prompt, params).tokens
        runs = cluster.orchestrator.runs
        stream = cluster.stream("r", prompt, params, prediction_token_ids=expected)
        events = [await anext(stream) for _ in range(10)]
        timeline = runs["r"].timeline
        before = timeline.drafts["prediction"].accepted
        (on,) = (worker for worker in cluster.decodes if worker.gateway_of)
        await cluster.remove(on)
        events += [event async for event in stream]
        assert [event.token_id for event in events] == expected
        assert timeline.drafts["prediction"].accepted > before > 0
        assert cluster.decodes[0].snapshot().drafts["prediction"].num_accepted > 0


async def test_what_a_stop_string_ends_has_finished_and_its_length_is_learnt(llama: SmallModel) -> None:
    """The workers know nothing of it: they are told that nobody waits any more."""
    async with cluster_of(llama) as cluster:
        answer = await Asking(cluster, llama)(n=1, stop=list(LETTERS))
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("", "stop")]
        assert [choice["end"] for choice in answer["details"]["of_choices"]] == ["finished"]
        await eventually(lambda: len(cluster.scheduler.scheduler.ledger.lengths) > 0)
        await cluster.idle()
