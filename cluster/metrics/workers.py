"""Prometheus metrics of the workers, out of what they report: where their KV rests, what became of prefixes, and what
their steps cost.

Workers listen for no scraper. What they count travels with their snapshots to every gateway, so whichever gateway is
asked shows all workers, each under its own label, some seconds old at most.

A new number is counted where it happens, is a field of `WorkerSnapshot` or of a report in it (so `PROTOCOL_VERSION`
rises), which `Worker.snapshot` in `kv_transfer.worker.base` fills, or a role's own, and has a `_Family` here and a row
in `docs/guide/metrics.md`. `test_worker_metrics.py` looks at all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kv_transfer.messages.fields import PrefixSource, Role, SourceName
from kv_transfer.messages.workers import DiskReport, KnownWorker, LinkReport, LoadingReport, WorkerSnapshot

_Samples = Iterable[tuple[tuple[str, ...], float]]
"""Pairs of the values of a family's own labels and the number."""


@dataclass(frozen=True, slots=True)
class _Family:
    """A metric that every worker has. `samples` reads its numbers from a worker's snapshot."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[WorkerSnapshot], _Samples]

    def collect(self, workers: Iterable[KnownWorker]) -> Metric:
        metric = self.kind(self.name, self.help, labels=("worker", "role", "model", *self.labels))
        for info, snapshot in workers:
            for labels, value in self.samples(snapshot):
                metric.add_metric([info.worker_id, info.role, info.model, *labels], value)
        return metric


class WorkerMetrics(Collector):
    """The metrics of all workers and pools. `workers()` gives the live workers with their newest snapshots, `pools()`
    how many workers each pool should have, by model; `least`: how many the configuration asks of each pool at least;
    `loading()`: the workers that are yet to come."""

    def __init__(
        self,
        workers: Callable[[], Iterable[KnownWorker]],
        pools: Callable[[], Mapping[str, Mapping[Role, int]]] = dict,
        least: Mapping[str, Mapping[Role, int]] | None = None,
        loading: Callable[[], Iterable[LoadingReport]] = tuple,
    ) -> None:
        self._workers = workers
        self._pools = pools
        self._least = least or {}
        self._loading = loading

    def collect(self) -> Iterator[Metric]:
        workers = list(self._workers())
        yield from (family.collect(workers) for family in _FAMILIES)
        yield from self._collect_pools(workers)

    def _collect_pools(self, workers: list[KnownWorker]) -> Iterator[Metric]:
        present = GaugeMetricFamily(
            "legato_pool_workers",
            "Workers that were started in the pool, by whether they load their model, serve or leave (draining)",
            labels=("model", "pool", "state"),
        )
        here = Counter(
            (info.home_model or info.model, info.home or info.role, "draining" if snapshot.draining else "serving")
            for info, snapshot in workers
        )
        here.update((report.home_model, report.home, "loading") for report in self._loading())
        configured = {(model, pool) for model, pools in self._least.items() for pool in pools}
        for model, pool in sorted({*configured, *((model, pool) for model, pool, _ in here)}):
            for state in ("loading", "serving", "draining"):
                present.add_metric([model, pool, state], here[model, pool, state])
        yield present
        yield _of_pools(
            "legato_pool_least_workers", "Workers that the configuration asks of the pool at least", self._least
        )
        yield _of_pools(
            "legato_pool_wanted_workers", "Workers that the pool should have, by the predicted demand", self._pools()
        )


def _of_pools(name: str, told: str, numbers: Mapping[str, Mapping[Role, int]]) -> Metric:
    """A gauge with a number for each pool of each model."""
    metric = GaugeMetricFamily(name, told, labels=("model", "pool"))
    for model, pools in numbers.items():
        for pool, number in pools.items():
            metric.add_metric([model, pool], number)
    return metric


def _one(number: Callable[[WorkerSnapshot], float]) -> Callable[[WorkerSnapshot], _Samples]:
    """Samples of a family with a single number and no labels of its own."""
    return lambda snapshot: [((), number(snapshot))]


def _disk(numbers: Callable[[DiskReport], dict[str, int]]) -> Callable[[WorkerSnapshot], _Samples]:
    """Samples of the disk tier's numbers, one for each label; none if the worker has no disk tier."""

    def samples(snapshot: WorkerSnapshot) -> _Samples:
        disk = snapshot.tiers.disk
        return [] if disk is None else [((label,), number) for label, number in numbers(disk).items()]

    return samples


def _blocks(snapshot: WorkerSnapshot) -> _Samples:
    for tier, blocks in snapshot.tiers.blocks.items():
        yield (tier, "free"), blocks.free
        yield (tier, "cached"), blocks.cached
        yield (tier, "held"), blocks.held


def _stored(snapshot: WorkerSnapshot) -> _Samples:
    tiers = snapshot.tiers
    if "host" in tiers.blocks:
        yield ("host",), tiers.host_stored_columns
    if tiers.disk is not None:
        yield ("disk",), tiers.disk.stored


def _dropped(snapshot: WorkerSnapshot) -> _Samples:
    tiers = snapshot.tiers
    if "host" in tiers.blocks:
        yield ("host", "no_room"), tiers.host_dropped_columns
    if tiers.disk is not None:
        yield ("disk", "queue"), tiers.disk.dropped_queue
        yield ("disk", "paused"), tiers.disk.dropped_paused
        yield ("disk", "slots"), tiers.disk.dropped_slots


def _steps(snapshot: WorkerSnapshot) -> _Samples:
    yield ("prefill",), snapshot.steps.num_prefill
    yield ("decode",), snapshot.steps.num_decode


def _step_tokens(snapshot: WorkerSnapshot) -> _Samples:
    yield ("prefill",), snapshot.steps.prefill_tokens
    yield ("decode",), snapshot.steps.decode_tokens


def _drafts(snapshot: WorkerSnapshot) -> _Samples:
    for drafter, drafts in snapshot.drafts.items():
        yield (drafter, "accepted"), drafts.num_accepted
        yield (drafter, "rejected"), drafts.num_drafted - drafts.num_accepted


def _moved_blocks(snapshot: WorkerSnapshot) -> _Samples:
    yield ("out",), snapshot.tiers.num_offloaded_blocks
    yield ("in",), snapshot.tiers.num_restored_blocks


def _links(number: Callable[[LinkReport], float]) -> Callable[[WorkerSnapshot], _Samples]:
    """Samples of one number of each link, labelled by the worker at its other end."""
    return lambda snapshot: [((peer,), number(link)) for peer, link in snapshot.links.items()]


def _by_source(numbers: Mapping[PrefixSource, int] | Mapping[SourceName, int]) -> _Samples:
    return [((source,), number) for source, number in numbers.items()]


def _cost_errors(snapshot: WorkerSnapshot) -> _Samples:
    cost = snapshot.step_cost
    if cost is not None:
        yield ("prefill",), cost.prefill_error
        yield ("decode",), cost.decode_error


def _cost_coefficients(snapshot: WorkerSnapshot) -> _Samples:
    cost = snapshot.step_cost
    if cost is not None:
        yield ("step",), cost.base_s
        yield ("prefill_step",), cost.prefill_base_s
        yield ("prefill_token",), cost.prefill_token_s
        yield ("prefill_pair",), cost.prefill_pair_s
        yield ("decode",), cost.decode_s
        yield ("context_token",), cost.context_token_s


_FAMILIES: Final = (
    _Family(
        GaugeMetricFamily,
        "legato_worker_waiting_requests",
        "Requests that were accepted and have no KV blocks yet",
        (),
        _one(lambda snapshot: snapshot.num_waiting),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_running_requests",
        "Requests that have KV blocks",
        (),
        _one(lambda snapshot: snapshot.num_running),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_queued_prompt_tokens",
        "Prompt tokens that were accepted and are not computed yet",
        (),
        _one(lambda snapshot: snapshot.queued_prefill_tokens),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_oldest_wait_seconds",
        "How long the oldest of the waiting requests has waited at this worker; 0 while none waits",
        (),
        _one(lambda snapshot: snapshot.oldest_wait_s),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_steps",
        "Steps computed, with prompt tokens (prefill) and without (decode)",
        ("kind",),
        _steps,
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_step_tokens",
        "Tokens computed in the steps of each kind, without drafts",
        ("kind",),
        _step_tokens,
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_draft_tokens",
        "Guessed tokens that steps checked, by who guessed them and whether they became tokens (accepted)",
        ("drafter", "outcome"),
        _drafts,
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_tokens_per_step",
        "Tokens that a decoding sequence had of each of its steps lately, in the mean; 1 without speculation",
        (),
        _one(lambda snapshot: snapshot.tokens_per_step),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_handoffs",
        "Hand-offs of a prompt's KV cache to this peer, verified there",
        ("peer",),
        _links(lambda link: link.num_handoffs),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_handoff_bytes",
        "KV bytes of these hand-offs",
        ("peer",),
        _links(lambda link: link.num_bytes),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_handoff_hidden_bytes",
        "Of these, bytes that were sent while the prompt was still being computed",
        ("peer",),
        _links(lambda link: link.num_hidden_bytes),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_handoff_exposed_seconds",
        "From the end of a prompt's last step until decode could go on with it, of all these hand-offs together",
        ("peer",),
        _links(lambda link: link.exposed_s),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_handoff_failures",
        "Hand-offs from this worker that came to nothing",
        (),
        _one(lambda snapshot: snapshot.num_failed_handoffs),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_kv_blocks",
        "Blocks of a worker's KV cache that are free, cached or in use (held), by tier: device, host memory, disk",
        ("tier", "state"),
        _blocks,
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_host_sequences",
        "Running sequences that have some layers of their KV cache in host memory",
        (),
        _one(lambda snapshot: snapshot.tiers.num_in_host),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_host_copy_bytes_per_second",
        "Bandwidth of KV copies between device and host memory, as measured",
        (),
        _one(lambda snapshot: snapshot.tiers.host_bytes_per_s),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_host_landings",
        "Sequences whose KV was received into host memory at first, as the device had no room",
        (),
        _one(lambda snapshot: snapshot.tiers.num_host_landings),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_offloads",
        "Times that layers of a running sequence were moved to host memory to make room",
        (),
        _one(lambda snapshot: snapshot.tiers.num_offloads),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_restores",
        "Times that layers of a running sequence were moved back to the device",
        (),
        _one(lambda snapshot: snapshot.tiers.num_restores),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_moved_blocks",
        "KV blocks of running sequences moved to host memory (out) and back to the device (in)",
        ("direction",),
        _moved_blocks,
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_preemptions",
        "Times that a sequence lost its KV cache for lack of memory and is computed again",
        (),
        _one(lambda snapshot: snapshot.tiers.num_preemptions),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_prefix_hit_tokens",
        "Prompt tokens found in the prefix cache, by where: device, host memory, a neighbour or disk",
        ("source",),
        lambda snapshot: _by_source(snapshot.tiers.hit_tokens),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_prefix_missed_tokens",
        "Prompt tokens not found in the prefix cache, which were computed",
        (),
        _one(lambda snapshot: snapshot.tiers.missed_tokens),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_loaded_columns",
        "Cached prefix blocks loaded into host memory, by where they were",
        ("source",),
        lambda snapshot: _by_source(snapshot.tiers.loaded_columns),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_load_failed_columns",
        "Cached prefix blocks that could not be loaded: gone, damaged, unreadable, or too late",
        ("source",),
        lambda snapshot: _by_source(snapshot.tiers.failed_columns),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_stored_columns",
        "Prefix blocks written to a lower tier",
        ("tier",),
        _stored,
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_dropped_columns",
        "Prefix blocks not written to a lower tier, and why",
        ("tier", "reason"),
        _dropped,
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_disk_bytes",
        "Bytes read from and written to the disk tier",
        ("direction",),
        _disk(lambda disk: {"read": disk.read_bytes, "written": disk.written_bytes}),
    ),
    _Family(
        CounterMetricFamily,
        "legato_worker_kv_disk_failures",
        "Damaged or unreadable files of the disk tier (read), and failed writes (write)",
        ("direction",),
        _disk(lambda disk: {"read": disk.lost, "write": disk.write_errors}),
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_step_cost_error",
        "How far off the prediction of a step's duration is: median of |measured / predicted - 1| of the latest steps",
        ("kind",),
        _cost_errors,
    ),
    _Family(
        GaugeMetricFamily,
        "legato_worker_step_cost_seconds",
        "Duration of a step by the worker's own prediction, for each unit of its work",
        ("unit",),
        _cost_coefficients,
    ),
)
