"""Stories of a decode worker that computes prompts for others, as text: what is done, and what its scheduler and the
sending end of its hand-offs do then (`scenarios/*.txt`).

After a change that is meant, `REWRITE_SCENARIOS=1 pytest tests/decode_workers/test_scenarios.py` writes down what
happens now, for `git diff` to show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from decode_workers.scheduler import DecodeScheduler
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockPool
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, StepPlan
from kv_transfer.handoff.actions import Action, Fail, ReleaseSource, Send, SendSlab
from kv_transfer.handoff.sender_state import HandoffSender
from kv_transfer.messages.handoff import Rejected, Verified
from kv_transfer.messages.requests import Endpoint, Fence, Ticket
from tests.support.ghost_runner import GhostRunner
from tests.support.stories import check_story

FOLDER = Path(__file__).parent / "scenarios"
FENCE = Fence(epoch=1, lease=1, generation=0)
ELSEWHERE = Endpoint(host="127.0.0.1", port=1, node_id="node")


class Story:
    """One decode worker, whose model has one layer and whose blocks hold four tokens. Slabs are taken at once.

    Commands (R: a request; W: another worker):

        world blocks=8              the size of its pool; the first command
        here R tokens=5 output=9    to be computed and decoded here
        for W R tokens=5 output=9   its prompt is computed here for W, which has room for it
        reserve R tokens=5          room is kept for a prompt that another worker computes
        step [n]                    a step is planned, computed and finished, or so many
        plan, finish                a step begins, and ends
        W verifies R, W rejects R   what the receiver says; `lose W`: it is gone
        cancel R                    the gateway wants no more of it
        stuck                       who is sent away, as all memory is kept for others
    """

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._states: dict[str, str] = {}
        self._lines: list[str] = []
        self._plan = StepPlan(())
        self.sender = HandoffSender()

    def run(self, command: str) -> list[str]:
        name, *words = command.split()
        self._lines = []
        if words and words[0] in ("verifies", "rejects"):
            self._answer(name, *words)
        else:
            plain, options = [w for w in words if "=" not in w], dict(w.split("=") for w in words if "=" in w)
            getattr(self, f"do_{name}")(*plain, **{key: int(value) for key, value in options.items()})
        for request_id, seq in self._sequences.items():
            found = self.scheduler.state(seq.key)
            state = "gone" if found is None else found.name
            if self._states.get(request_id, "") != state:
                self._states[request_id] = state
                self._lines.append(f"{request_id} is {state}")
        self.pool.check()
        free = f"{self.pool.num_available} of {self.pool.num_blocks} blocks are free"
        return [*self._lines, free]

    def do_world(self, blocks: int) -> None:
        self.pool = BlockPool(blocks)
        allocator = BlockAllocator(self.pool, layer_groups=1, block_size=4, prefix_caching=False)
        self.runner = GhostRunner(allocator)
        self.scheduler = DecodeScheduler(
            allocator, max_num_seqs=8, token_budget=16, max_model_len=4 * blocks, eos_token_ids=frozenset()
        )

    def do_here(self, request_id: str, tokens: int, output: int) -> None:
        self.scheduler.add(self._sequence(request_id, tokens, output))

    def do_for(self, worker: str, request_id: str, tokens: int, output: int = 9) -> None:
        seq = self._sequence(request_id, tokens, output)
        ticket = Ticket(
            request_id=request_id, fence=FENCE, endpoint=ELSEWHERE, worker_id=worker, num_tokens=tokens, ttl_s=12.0
        )
        self._do(self.sender.begin(ticket, num_layers=1, num_tokens=tokens, now=0.0))
        self.scheduler.add(seq, hands_over=True)

    def do_reserve(self, request_id: str, tokens: int) -> None:
        self.scheduler.reserve(self._sequence(request_id, tokens, 9))

    def do_step(self, times: str = "1") -> None:
        for _ in range(int(times)):
            self.do_plan()
            self.do_finish()

    def do_plan(self) -> None:
        self._plan = self.scheduler.plan()
        items = [f"{item.num_tokens} of {item.seq.request_id}" for item in self._plan.items]
        self._lines.append("computes " + (", ".join(items) or "nothing"))
        for item in self._plan.items:
            self._do(self.sender.on_layer_ready(item.seq.key, 0, item.start, item.num_tokens, 0.0))

    def do_finish(self) -> None:
        plan = self._plan
        for emission in self.scheduler.finish_step(plan, self.runner.execute(plan)):
            seq = emission.seq
            end = "" if emission.finish is None else ", its last"
            self._lines.append(f"{seq.request_id} has token {emission.index}{end}")
            if emission.finish is None:
                self._do(self.sender.on_computed(seq.key, (emission.token.token_id, emission.index), 0.0))
            else:
                self._do(self.sender.cancel(seq.key, "the request ended with its first token"))

    def do_lose(self, worker: str) -> None:
        self._do(self.sender.on_link_lost(worker))

    def do_cancel(self, request_id: str) -> None:
        key = self._sequences[request_id].key
        self.scheduler.drop(key)
        self._do(self.sender.cancel(key, "cancelled"))

    def do_stuck(self) -> None:
        for seq in self.scheduler.stuck():
            self._lines.append(f"{seq.request_id} is sent away")
            self.do_cancel(seq.request_id)

    def _answer(self, worker: str, what: str, request_id: str) -> None:
        verified = Verified(request_id=request_id, fence=FENCE)
        rejected = Rejected(request_id=request_id, fence=FENCE, reason="the reservation is over")
        self._do(self.sender.on_message(worker, verified if what == "verifies" else rejected))

    def _sequence(self, request_id: str, tokens: int, output: int) -> Sequence:
        number = len(self._sequences) + 2
        seq = self._sequences[request_id] = Sequence(
            request_id=request_id,
            attempt=0,
            params=SamplingParams(max_tokens=output, seed=0, ignore_eos=True),
            prompt_token_ids=[number] * tokens,
        )
        return seq

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendSlab():
                    stop = action.token_start + action.num_tokens
                    self._lines.append(
                        f"→ {action.worker_id}: tokens [{action.token_start}, {stop}) of {action.request_id}"
                    )
                    self._do(self.sender.on_slab_sent(action.key, action.layer, action.token_start, 0, 0.0))
                case Send():
                    self._lines.append(f"→ {action.peer_id}: {type(action.message).__name__}")
                case Fail():
                    self._lines.append(f"the gateway hears that {action.key.request_id} failed: {action.reason}")
                case ReleaseSource():
                    self.scheduler.release(action.key)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_story(name: str) -> None:
    check_story(FOLDER / f"{name}.txt", Story().run)
