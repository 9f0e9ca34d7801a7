"""Several models on one clock, with the product's own rule for which worker goes from one of them to another.

Each model is a `Simulation` of its own, with a scheduler of its own, as in the cluster (decision 0037). Once a second
`ModelExchange` is asked, and `RoleChanges` whether that worker may go: it drains, is gone for as long as changing its
model takes, and comes back among the other one's workers, with nothing cached and the shape of their pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from cluster.autoscaling.controller import Autoscaler, ModelExchange
from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.role_changes import RoleChanges
from cluster.simulation.clock import VirtualClock
from cluster.simulation.records import RequestRecord
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import Simulation, SimulationConfig, SimulationResult
from cluster.simulation.workers.worker import SimulatedWorker
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.report import SloReport
from cluster.slo.tracker import SloTracker
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import RoleRequest
from kv_transfer.messages.workers import ChangeRole, WorkerInfo

_ORDERS_S: Final = 1.0  # as `SchedulerServer` does
_MANY: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A worker, `process`, was told at `ordered_at` to change to `model`, and was one of its workers at `came_at`."""

    process: str
    model: str
    ordered_at: float
    came_at: float


@dataclass(frozen=True, slots=True)
class ModelsResult:
    """What became of the requests for each model, by its name, and who changed to which model."""

    by_model: dict[str, SimulationResult]
    changes: list[ModelChange]

    @property
    def records(self) -> list[RequestRecord]:
        """Those of all models, one model's after another's."""
        return [record for result in self.by_model.values() for record in result.records]

    @property
    def in_time(self) -> float:
        """The share of all requests that were served in time."""
        records = self.records
        return sum(record.is_met for record in records) / len(records)


def simulate_models(
    configs: Mapping[str, SimulationConfig],
    requests: Mapping[str, Iterable[TraceRequest]],
    *,
    change_s: Mapping[str, float] | None = None,
    decisions: Mapping[str, DecisionPolicy] | None = None,
) -> ModelsResult:
    """Play a trace for each model, at the same time, to their ends. `change_s`: by model, from the end of a worker of
    another one until it is one of its; None: workers stay with their model. `decisions`: how each model's requests are
    placed; None: as by default. Raises ValueError where a trace holds no requests, or not in order of arrival, and for
    workers of one model that are unlike each other."""
    return _Models(configs, change_s, decisions).run(requests)


class _OneModel(Simulation):
    """One of several models: its workers tell which model they have, and who they are whatever they have."""

    def __init__(
        self,
        name: str,
        others: list[str],
        change_s: float,
        config: SimulationConfig,
        clock: VirtualClock,
        decision: DecisionPolicy,
    ) -> None:
        self.name = name
        self._others = others
        self._change_s = change_s
        self._guests: dict[str, WorkerInfo] = {}  # what they were at first, by the names that they have here
        self.router = LegatoRouter(decision)
        self._tracker = SloTracker(config.slo, now_s=0.0)
        self._news = SloReport()
        self.autoscaler = Autoscaler(self.router.ledger, _plan(config), self._tracker, 0.0, model=name)
        self.router.on_verdict = self.autoscaler.watch.asked
        super().__init__(config, self.router, self._tell, clock)

    def take_in(self, worker_id: str, first: WorkerInfo, number: int) -> None:
        """Have a worker of another model from now on. `first`: what it was when it was started."""
        self._guests[worker_id] = first
        self.join(worker_id, number=number)

    def absorb_news(self, now: float) -> None:
        """What has ended since is known from now on."""
        self._tracker.absorb(now, self._news)
        self._news = SloReport()

    def _tell(self, record: RequestRecord) -> None:
        record.report(self._news, self._clock.now, self.name)

    def _make_worker(self, worker_id: str, *, number: int, life: int = 0) -> SimulatedWorker:
        worker = super()._make_worker(worker_id, number=number, life=life)
        first = self._guests.get(worker_id)
        worker.info = replace(
            worker.info,
            model=self.name,
            models=self._others,
            load_s=self._change_s,
            endpoint=Endpoint(host="", port=0, node_id=worker_id if first is None else first.endpoint.node_id),
            home=worker.info.role if first is None else first.home,
            home_model=self.name if first is None else first.home_model,
        )
        return worker


class _Models:
    def __init__(
        self,
        configs: Mapping[str, SimulationConfig],
        change_s: Mapping[str, float] | None,
        decisions: Mapping[str, DecisionPolicy] | None,
    ) -> None:
        self._clock = VirtualClock()
        self._change_s = change_s
        self._models: dict[str, _OneModel] = {}
        self._num_started = 0
        for name, config in configs.items():
            if config.shapes and change_s is not None:
                raise ValueError(
                    f"workers of {name} are unlike each other: leave them alike, or let them keep their model"
                )
            numbered = replace(config, first_number=self._num_started)
            self._num_started += config.num_prefill + config.num_decode
            others = [other for other in configs if other != name]
            load_s = 0.0 if change_s is None else change_s[name]
            decision = DecisionPolicy() if decisions is None else decisions[name]
            self._models[name] = _OneModel(name, others, load_s, numbered, self._clock, decision)
        autoscalers = {name: model.autoscaler for name, model in self._models.items()}
        self._exchange = ModelExchange({} if change_s is None else autoscalers)
        self._role_changes = RoleChanges()
        self._changes: list[ModelChange] = []
        self._clock.after(_ORDERS_S, self._order)

    def run(self, requests: Mapping[str, Iterable[TraceRequest]]) -> ModelsResult:
        for name, model in self._models.items():
            model.begin(iter(requests[name]))
        while self._clock.step():
            pass
        return ModelsResult({name: model.result() for name, model in self._models.items()}, self._changes)

    def _order(self) -> None:
        """What `SchedulerServer` does every second."""
        now = self._clock.now
        for model in self._models.values():
            model.absorb_news(now)
            assert not any(model.autoscaler.orders(now)), "pools are of fixed size but for changes of models"
        known = [worker for model in self._models.values() for worker in model.router.ledger.workers()]
        for worker_id, order in self._exchange.orders(known, now):
            assert isinstance(order, ChangeRole)
            [info] = (info for info, _ in known if info.worker_id == worker_id)
            asked = RoleRequest(
                ask_id=0, worker_id=worker_id, role=order.role, drain_s=order.drain_s, model=order.model
            )
            old, new = self._models[info.model], self._models[order.model]
            if self._role_changes.ask(asked, old.router, new.router, now).outcome == "ordered":
                old.drain(worker_id, order.drain_s, partial(self._left, info, order, now))
            else:
                self._exchange.refused(worker_id)
        if not all(model.is_over for model in self._models.values()):
            self._clock.after(_ORDERS_S, self._order)

    def _left(self, info: WorkerInfo, order: ChangeRole, ordered_at: float) -> None:
        """A worker has left its model."""
        assert self._change_s is not None
        self._role_changes.gone(info.worker_id, self._clock.now, in_order=True)
        change_s = self._change_s[order.model]
        self._clock.after(change_s, lambda: self._come(info, order.role, order.model, ordered_at))

    def _come(self, info: WorkerInfo, role: Role, model: str, ordered_at: float) -> None:
        number = self._num_started + len(self._changes)
        self._models[model].take_in(f"{role}-{number}", info, number)
        self._changes.append(ModelChange(info.endpoint.node_id, model, ordered_at, self._clock.now))


def _plan(config: SimulationConfig) -> PoolsPlan:
    """As `cluster.config.build_scheduler.pools_plan` has it of pools without autoscaling."""

    def rules(size: int, most: int) -> PoolRules:
        return PoolRules(min_workers=0, initial=size, max_workers=most, scales=False)

    return PoolsPlan(
        prefill=rules(config.num_prefill, _MANY if config.num_prefill else 0), decode=rules(config.num_decode, _MANY)
    )
