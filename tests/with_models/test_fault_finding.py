"""Who is told to have been in a step that broke the device."""

from __future__ import annotations

from engine.sampling.grammar import GrammarError
from engine.sampling.params import SamplingParams
from engine.sequence import ScheduledSequence, Sequence, StepPlan
from engine.steps.fault_finding import FaultFinder
from engine.steps.loading import EngineConfig, load_model
from tests.support.small_models import SmallModel

_PARAMS = SamplingParams(max_tokens=1, seed=0)


def _sequence(name: str, num_alone: int = 0) -> Sequence:
    return Sequence(request_id=name, attempt=0, params=_PARAMS, prompt_token_ids=[1], num_alone=num_alone)


def _plan(*seqs: Sequence) -> StepPlan:
    return StepPlan(tuple(ScheduledSequence(seq, 1) for seq in seqs))


def test_who_comes_after_the_first_step_that_failed_was_not_there(llama: SmallModel) -> None:
    """It may have met a device that was broken already."""
    finder = FaultFinder(load_model(EngineConfig(model_ref=str(llama.folder), model_name="model", kv_blocks=8)))
    one, two, late = _sequence("one"), _sequence("two"), _sequence("late", num_alone=2)
    assert finder.failed(_plan(one, two), RuntimeError("broken")) is None, "it may be either"
    assert finder.failed(_plan(late), RuntimeError("broken")) is late
    assert [finder.was_there(seq.key) for seq in (one, two, late)] == [True, True, False]
    finder.begin_anew()
    assert finder.failed(_plan(late), RuntimeError("broken")) is late
    assert [finder.was_there(seq.key) for seq in (one, two, late)] == [False, False, True]


def test_who_was_beside_a_grammar_that_failed_was_not_there(llama: SmallModel) -> None:
    """When the device breaks next, those in that step are, whoever they are."""
    finder = FaultFinder(load_model(EngineConfig(model_ref=str(llama.folder), model_name="model", kv_blocks=8)))
    theirs, beside, late = _sequence("theirs"), _sequence("beside"), _sequence("late", num_alone=1)
    assert finder.failed(_plan(theirs, beside), GrammarError(theirs.key, "too complex")) is None
    assert finder.failed(_plan(late), RuntimeError("broken")) is late
    assert [finder.was_there(seq.key) for seq in (theirs, beside, late)] == [False, False, True]
