"""The network between simulated workers: what goes on at the same time shares every worker's link, in and out.

Bytes are a fluid. Rates are max-min fair: nobody could have more without taking it from somebody who has no more. They
change when bytes become ready, have been sent, or will not be; between two such moments nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cluster.simulation.clock import VirtualClock

_INSTANT_S: Final = 1e-9  # what takes less has been sent: rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """A worker's link to all others: `bytes_per_s` out, and as many in. `token_bytes`: the KV of a token in all of the
    model's `num_layers`, which workers send one after the other as they are computed."""

    bytes_per_s: float
    token_bytes: int
    num_layers: int

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.token_bytes < 1 or self.num_layers < 1:
            raise ValueError(f"{self}: all of these are positive")

    @property
    def hidden_token_bytes(self) -> float:
        """The bytes of a token that may be sent while the step that computes it goes on: all layers but the last."""
        return self.token_bytes * (self.num_layers - 1) / self.num_layers


@dataclass(slots=True, eq=False)
class LinkDirection:
    """One direction of one worker's link."""

    bytes_per_s: float
    left: float = 0.0  # while rates are computed: bytes per second that are not given out, and flows without a rate
    num_flows: int = 0


class Flow:
    """A flow of bytes from one worker to another one, that become ready as the sender computes."""

    def __init__(self, network: Network, out: LinkDirection, into: LinkDirection) -> None:
        self.ports = (out, into)
        self.num_tokens = 0  # for its owner to keep: whose KV is sent, or will be
        self.ready = 0.0  # bytes that could be sent now
        self.inflow = 0.0  # bytes per second that become ready,
        self.inflow_until = 0.0  # until then
        self.rate = 0.0
        self.on_sent: Callable[[], None] = lambda: None
        self._network = network
        self._is_closed = False

    def add(self, num_bytes: float) -> None:
        """Add bytes that are ready now."""
        self._network.catch_up()
        self.ready += num_bytes
        self._network.share()

    def add_over(self, num_bytes: float, seconds: float) -> None:
        """Add bytes that become ready within so many seconds, evenly. Those before them are ready by now."""
        self._network.catch_up()
        self.inflow, self.inflow_until = num_bytes / seconds, self._network.now + seconds
        self._network.share()

    def close(self, on_sent: Callable[[], None] | None) -> None:
        """No more will follow: `on_sent` is called when all have been sent, perhaps at once. None: nobody wants them
        any more."""
        self._network.catch_up()
        if on_sent is None:
            self.ready = self.inflow = 0.0
        self.on_sent = on_sent or (lambda: None)
        self._is_closed = True
        self._network.share()

    @property
    def wants(self) -> float:
        """Bytes per second that it could send."""
        return math.inf if self.ready else self.inflow

    def catch_up(self, seconds: float, now: float) -> None:
        """Count what has gone by at its rate in these seconds."""
        self.ready += (self.inflow - self.rate) * seconds
        if self.ready <= self.rate * _INSTANT_S:
            self.ready = 0.0
        if now >= self.inflow_until - _INSTANT_S:
            self.inflow = 0.0

    def next_s(self, now: float) -> float:
        """How long its rate stays right, if no other one's changes."""
        empty_s = self.ready / (self.rate - self.inflow) if self.ready and self.rate > self.inflow else math.inf
        return min(empty_s, self.inflow_until - now if self.inflow else math.inf)

    @property
    def is_over(self) -> bool:
        return self._is_closed and not self.wants


class Network:
    """All links. Workers open a flow for each prompt that they compute for another one."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._ports: dict[tuple[str, str], LinkDirection] = {}
        self._active: list[Flow] = []  # in order of their opening or of waking up: the same in every run
        self._as_of = 0.0
        self._num_shared = 0

    @property
    def now(self) -> float:
        return self._clock.now

    def open(self, sender: str, sender_link: NetworkLink, receiver: str, receiver_link: NetworkLink) -> Flow:
        out = self._ports.setdefault(("out", sender), LinkDirection(sender_link.bytes_per_s))
        into = self._ports.setdefault(("in", receiver), LinkDirection(receiver_link.bytes_per_s))
        flow = Flow(self, out, into)
        self._active.append(flow)
        return flow

    def catch_up(self) -> None:
        """Bring all flows up to the present."""
        seconds, self._as_of = self.now - self._as_of, self.now
        if seconds > 0:
            for flow in self._active:
                flow.catch_up(seconds, self.now)

    def share(self) -> None:
        """Give each flow its rate anew, tell of those that are over, and come back when a rate is no longer right."""
        sent = [flow for flow in self._active if flow.is_over]
        self._active = [flow for flow in self._active if not flow.is_over]
        for flow in self._active:
            flow.rate = 0.0
        busy = [flow for flow in self._active if flow.wants]
        _fill(busy)
        next_s = min((flow.next_s(self.now) for flow in busy), default=math.inf)
        self._num_shared += 1
        if next_s < math.inf:
            number = self._num_shared
            self._clock.after(max(next_s, 0.0), lambda: self._again(number))
        for flow in sent:
            flow.on_sent()

    def _again(self, number: int) -> None:
        if number == self._num_shared:  # else rates have changed since
            self.catch_up()
            self.share()


def _fill(flows: list[Flow]) -> None:
    """Rates grow together; who has what it wants, or a full port, stays where it is."""
    for flow in flows:
        for port in flow.ports:
            port.left, port.num_flows = port.bytes_per_s, 0
    for flow in flows:
        for port in flow.ports:
            port.num_flows += 1
    while flows:
        fullest = min((port for flow in flows for port in flow.ports), key=lambda port: port.left / port.num_flows)
        share = max(0.0, fullest.left / fullest.num_flows)
        fixed = [flow for flow in flows if flow.wants <= share] or [flow for flow in flows if fullest in flow.ports]
        for flow in fixed:
            flow.rate = min(flow.wants, share)
            for port in flow.ports:
                port.left -= flow.rate
                port.num_flows -= 1
        flows = [flow for flow in flows if flow not in fixed]
