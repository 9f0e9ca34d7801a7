"""Classes of service: which promise a request gets, and what no configuration may say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.config.settings import SloSettings
from cluster.errors import InvalidRequestError
from cluster.slo.classes import NO_TARGETS, SloClass, SloConfig
from cluster.slo.report import gap_p99

INTERACTIVE = SloClass(name="interactive", ttft_s=2.0, tpot_s=0.1, service_tiers=("priority", "scale"))
BATCH = SloClass(name="batch", service_tiers=("flex",))


@pytest.mark.parametrize(
    ("tier", "headers", "promise"),
    [
        (None, {}, INTERACTIVE),
        ("auto", {}, INTERACTIVE),
        ("default", {}, INTERACTIVE),
        ("priority", {}, INTERACTIVE),
        ("interactive", {}, INTERACTIVE),
        ("flex", {}, BATCH),
        ("batch", {}, BATCH),
        (None, {"x-slo-class": "batch"}, BATCH),
        ("priority", {"x-slo-class": "batch"}, BATCH),  # the header is Legato's own, so it was meant
        ("auto", {"x-slo-ttft-ms": "350"}, replace(INTERACTIVE, ttft_s=0.35)),
        ("flex", {"x-slo-tpot-ms": "12.5"}, replace(BATCH, tpot_s=0.0125)),
        (None, {"x-slo-gap-ms": "200"}, replace(INTERACTIVE, gap_s=0.2)),
    ],
)
def test_a_request_chooses_its_promise(tier: str | None, headers: dict[str, str], promise: SloClass) -> None:
    assert SloConfig().choose(tier, headers) == promise


def test_a_tier_of_openai_may_be_given_to_any_class() -> None:
    gold = SloClass(name="gold", ttft_s=0.2, service_tiers=("priority",))
    bulk = SloClass(name="bulk", service_tiers=("auto",))
    config = SloConfig(classes=(gold, bulk), default="gold")
    assert config.choose("priority", {}).name == "gold"
    assert config.choose("auto", {}).name == "bulk"
    assert config.choose("default", {}).name == "gold"


@pytest.mark.parametrize("tier", [None, "auto", "default", "flex", "scale", "priority"])
def test_clients_made_for_openai_work_with_any_classes(tier: str | None) -> None:
    bulk = SloClass(name="bulk", ttft_s=9.0)
    assert SloConfig(classes=(bulk,), default="bulk").choose(tier, {}) == bulk
    assert NO_TARGETS.choose(tier, {}) == SloClass(name="default", ttft_s=None, tpot_s=None)


@pytest.mark.parametrize(
    ("tier", "headers", "param", "says"),
    [
        ("turbo", {}, "service_tier", "auto, default, flex, scale, priority, interactive, batch"),
        (None, {"x-slo-class": "flex"}, "x-slo-class", "interactive, batch"),  # a tier is no class
        (None, {"x-slo-class": ""}, "x-slo-class", "interactive, batch"),
        (None, {"x-slo-ttft-ms": "soon"}, "x-slo-ttft-ms", "'soon'"),
        (None, {"x-slo-ttft-ms": "nan"}, "x-slo-ttft-ms", "milliseconds"),
        (None, {"x-slo-tpot-ms": "inf"}, "x-slo-tpot-ms", "milliseconds"),
        (None, {"x-slo-tpot-ms": "0"}, "x-slo-tpot-ms", "above 0"),
        (None, {"x-slo-tpot-ms": "-5"}, "x-slo-tpot-ms", "above 0"),
        (None, {"x-slo-gap-ms": "never"}, "x-slo-gap-ms", "milliseconds"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    tier: str | None, headers: dict[str, str], param: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        SloConfig().choose(tier, headers)
    assert caught.value.param == param


def test_a_refusal_quotes_little_of_a_long_text() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SloConfig().choose("x" * 10_000, {})
    assert len(str(caught.value)) < 200


def test_a_promise_is_met_up_to_its_target_and_always_without_one() -> None:
    assert INTERACTIVE.meets_ttft(2.0) and not INTERACTIVE.meets_ttft(2.001)
    assert INTERACTIVE.meets_tpot(0.1) and not INTERACTIVE.meets_tpot(0.101)
    assert INTERACTIVE.meets_tpot(None), "one token has no time per token"
    assert BATCH.meets_ttft(1e9) and BATCH.meets_tpot(1e9)
    assert INTERACTIVE.has_targets and not BATCH.has_targets
    assert SloClass(name="steady", gap_s=0.2).has_targets


def test_one_gap_in_a_hundred_may_be_late() -> None:
    steady = SloClass(name="steady", gap_s=0.2)
    for num_gaps in (1, 99, 100, 101, 199, 200, 100_000):
        allowed = num_gaps // 100
        for num_late, is_met in ((allowed, True), (allowed + 1, False)):
            gaps = np.repeat([0.5, 0.1], [num_late, num_gaps - num_late])
            assert steady.meets_gap_p99(gap_p99(gaps)) is is_met, num_gaps
    assert BATCH.meets_gap_p99(gap_p99(np.full(5, 1e9))), "nothing was promised"


@given(
    st.lists(st.sampled_from([0.01, 0.2, 0.5]), max_size=120),
    st.lists(st.sampled_from([0.01, 0.2, 0.5]), max_size=120),
    st.sampled_from([0.005, 0.01, 0.1, 0.2, 0.5]),
)
def test_the_p99_of_gaps_tells_which_targets_they_meet(some: list[float], more: list[float], target_s: float) -> None:
    gaps, steady = [*some, *more], SloClass(name="steady", gap_s=target_s)
    num_late = sum(gap_s > target_s for gap_s in gaps)
    assert steady.meets_gap_p99(gap_p99(np.array(gaps))) == (num_late * 100 <= len(gaps))


def test_no_gaps_meet_any_target() -> None:
    assert gap_p99(np.array([])) is None
    assert SloClass(name="steady", gap_s=1e-6).meets_gap_p99(None) and BATCH.meets_gap_p99(1e9)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_targets_are_times(bad: float) -> None:
    with pytest.raises(ValueError, match="TTFT target"):
        SloClass(name="a", ttft_s=bad)
    with pytest.raises(ValueError, match="TPOT target"):
        SloClass(name="a", tpot_s=bad)
    with pytest.raises(ValueError, match="gap target"):
        SloClass(name="a", gap_s=bad)


@pytest.mark.parametrize("bad", [0.0, 1.0, 99.0, float("nan")])
def test_a_share_leaves_an_error_budget(bad: float) -> None:
    with pytest.raises(ValueError, match="error budget"):
        SloClass(name="a", share=bad)


def test_every_word_means_one_class() -> None:
    with pytest.raises(ValueError, match="'flex' means"):
        SloConfig(classes=(SloClass(name="a", service_tiers=("flex",)), SloClass(name="flex")), default="a")
    with pytest.raises(ValueError, match="'a' means"):
        SloConfig(classes=(SloClass(name="a"), SloClass(name="a")), default="a")
    with pytest.raises(ValueError, match="default SLO class is 'b'"):
        SloConfig(classes=(SloClass(name="a"),), default="b")


def test_settings_without_a_word_are_the_defaults() -> None:
    assert SloSettings().config() == SloConfig()


def test_settings_are_read_in_milliseconds() -> None:
    text = (
        "{default: chat, classes: {chat: {ttft_ms: 250, gap_ms: 40, share: 0.95, service_tiers: [priority]}, bulk: {}}}"
    )
    settings = SloSettings.model_validate(yaml.safe_load(text))
    assert settings.config() == SloConfig(
        classes=(
            SloClass(name="chat", ttft_s=0.25, gap_s=0.04, share=0.95, service_tiers=("priority",)),
            SloClass(name="bulk"),
        ),
        default="chat",
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{default: chat}", "there are interactive, batch"),
        ("{classes: {a: {ttft_ms: 0}}, default: a}", "greater than 0"),
        ("{classes: {a: {gap_ms: 0}}, default: a}", "greater than 0"),
        ("{classes: {a: {ttft_ms: 1.e+12}}, default: a}", "at most a day"),
        ("{classes: {a: {share: 1}}, default: a}", "less than 1"),
        ("{classes: {a: {ttft: 10}}, default: a}", "Extra inputs"),
        ("{classes: {}, default: a}", "default SLO class"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SloSettings.model_validate(yaml.safe_load(text))
