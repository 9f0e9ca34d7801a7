"""Four countings of the same requests, under both promises."""

from __future__ import annotations

from dataclasses import replace

from cluster.slo.classes import SloClass
from cluster.slo.countings import HEADLINE, LEAST, MeasuredRequest, count, table_rows

_SLO = SloClass(name="s", ttft_s=1.0, tpot_s=0.05, gap_s=0.2)
_GOOD = MeasuredRequest(slo=_SLO, prompt_tokens=100, output_tokens=10, ttft_s=0.5, tpot_s=0.04, gap_p99_s=0.1)


def _hundred() -> list[MeasuredRequest]:
    return [replace(_GOOD, prompt_tokens=100 * (number + 1)) for number in range(200)]


def test_who_turns_the_longest_tenth_away_serves_most_requests_and_neither_tokens_nor_everyone() -> None:
    requests = [r if r.prompt_tokens <= 18_000 else replace(r, ttft_s=None) for r in _hundred()]
    for found in count(requests).values():
        assert found.shares["requests"] == found.shares["most requests"] == 0.9
        assert found.is_enough("requests") and not found.is_enough("most requests")
        assert 0.8 < found.shares["tokens"] < 0.82
        assert found.shares[HEADLINE] == 0.0
        assert found.least == "18100 to 20000 tokens"


def test_a_tenant_that_is_served_less_is_the_least() -> None:
    requests = [replace(r, tenant="b" if number % 4 else "a") for number, r in enumerate(_hundred())]
    requests = [replace(r, ttft_s=2.0) if number % 8 == 0 else r for number, r in enumerate(requests)]
    found = count(requests)["TTFT and TPOT"]
    assert found.least == "tenant a"
    few = [replace(r, tenant="a" if number < LEAST - 1 else "b") for number, r in enumerate(_hundred())]
    few = [replace(r, ttft_s=None) if r.tenant == "a" and r.prompt_tokens == 100 else r for r in few]
    assert "tokens" in count(few)["TTFT and TPOT"].least, "too few requests are no group"


def test_a_mean_hides_a_stall_that_gaps_tell() -> None:
    stalled = [replace(r, gap_p99_s=0.3) for r in _hundred()]
    found = count(stalled)
    assert found["TTFT and TPOT"].shares[HEADLINE] == 1.0
    assert found["TTFT and gaps"].shares[HEADLINE] == 0.0


def test_gaps_that_nobody_promised_are_judged_by_twice_the_mean() -> None:
    slo = replace(_SLO, gap_s=None)
    inside, outside = (count([replace(_GOOD, slo=slo, gap_p99_s=gap_s)]) for gap_s in (0.09, 0.11))
    assert inside["TTFT and gaps"].is_enough("requests")
    assert not outside["TTFT and gaps"].is_enough("requests")


def test_a_table_has_the_headline_first_and_says_who_has_least() -> None:
    head, by_mean, by_gaps = table_rows(count(_hundred()))
    assert head[1] == "80% of each length and tenant" and len(head) == len(by_mean) == len(by_gaps) == 6
    assert by_mean[1] == "yes, 100.0%"
