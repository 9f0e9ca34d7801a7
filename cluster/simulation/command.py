"""`python -m cluster simulate`: play a trace over simulated workers and print what the requests would have seen.

What may be asked for is in `cluster.simulation.arguments`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.simulation.failures import Kill, Slow
from cluster.simulation.models import simulate_models
from cluster.simulation.records import RequestRecord, Summary, tell
from cluster.simulation.routers.base import Router
from cluster.simulation.routers.baselines import (
    CacheAware,
    Colocated,
    DistServe,
    Dynamo,
    LeastOutstandingTokens,
    LlmdHeadroom,
    Mooncake,
    QueueLengthRouter,
    RoundRobin,
)
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.links import NetworkLink
from cluster.simulation.workers.worker import WorkerShape, measured
from cluster.simulation.workload.synthetic import Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest, paced, read_trace, scaled, swing
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import (
    A100_SXM,
    H100_SXM,
    L40S,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    kv_capacity_tokens,
    roofline_cost,
)
from engine.cost_model.step_cost import StepCost

MODELS: Final = {"llama-3.1-8b": LLAMA_3_1_8B, "llama-3.1-70b": LLAMA_3_1_70B}
DEVICES: Final = {"h100": H100_SXM, "a100": A100_SXM, "l40s": L40S}
# `cluster.simulation.arguments.ROUTER_NAMES` has the names once more, for a command line that imports next to nothing.
ROUTERS: Final[dict[str, Callable[[], Router]]] = {
    "legato": LegatoRouter,
    "legato-auto": lambda: LegatoRouter(DecisionPolicy(one_pool=True)),
    "legato-queues": QueueLengthRouter,
    "round-robin": RoundRobin,
    "least-tokens": LeastOutstandingTokens,
    "colocated": Colocated,
    "distserve": DistServe,
    "dynamo": Dynamo,
    "mooncake": Mooncake,
    "llm-d": LlmdHeadroom,
    "cache-aware": CacheAware,
}

_ONE_POOL: Final = ("colocated", "legato-auto")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code. Raises ValueError, with advice, for what cannot be simulated."""
    if arguments.plot is not None or arguments.plot_loads is not None:
        _require_plots(arguments)
    each = of_each_model(arguments)
    if len(each) > 1:
        _run_models(arguments, each)
        return 0
    [(_, arguments)] = each.items()
    records: dict[str, list[RequestRecord]] = {}
    summaries: dict[str, list[tuple[float, Summary]]] = {}
    for name in arguments.router or ["legato"]:
        config = _config(arguments, one_pool=name in _ONE_POOL)
        for load in arguments.plot_loads or [1.0]:
            result = simulate(config, _requests(arguments, load), ROUTERS[name]())
            summary = result.summary
            tell(summary, as_json=arguments.json)
            records[name] = result.records
            summaries.setdefault(name, []).append((arguments.load * load, summary))
    if arguments.plot is not None:
        _plot(arguments, records, summaries)
    return 0


def of_each_model(arguments: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The arguments of each model, as if it were alone, by a name of its own. Raises ValueError where they do not fit
    together."""
    models = arguments.model or ["llama-3.1-8b"]
    traces, formats = arguments.trace or [None] * len(models), arguments.format or ["mooncake"]
    if len(traces) != len(models) or len(formats) not in (1, len(traces)):
        raise ValueError(
            f"for {len(models)} models there are {len(traces)} traces in {len(formats)} formats: give each model a"
            " --trace, or none, and each trace a --format, or one for all"
        )
    if len(models) == 1 and (arguments.swing is not None or arguments.model_flips is not None):
        raise ValueError("--swing and --model-flips are between models: give --model several times")
    each: dict[str, argparse.Namespace] = {}
    for number, model in enumerate(models):
        own = {
            "model": model,
            "trace": traces[number],
            "format": formats[number % len(formats)],
            "seed": arguments.seed + number,
        }
        earlier = models[:number].count(model)
        each[f"{model}#{earlier + 1}" if earlier else model] = argparse.Namespace(**{**vars(arguments), **own})
    return each


def _run_models(arguments: argparse.Namespace, each: dict[str, argparse.Namespace]) -> None:
    """Play several models at the same time, with each router. Raises ValueError for what is told of one alone."""
    names = arguments.router or ["legato"]
    for option in ("plot", "worker", "kill", "slow"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} is not there for several models; leave it out, or simulate one")
    if other := set(names) - {"legato", "legato-auto"}:
        raise ValueError(f"--router {min(other)} knows one model; of several there are legato and legato-auto")
    for router in names:
        one_pool = router in _ONE_POOL
        result = simulate_models(
            {name: _config(own, one_pool=one_pool) for name, own in each.items()},
            {name: _swinging(own, number / len(each)) for number, (name, own) in enumerate(each.items())},
            change_s=None if arguments.model_flips is None else dict.fromkeys(each, arguments.model_flips),
            decisions=dict.fromkeys(each, DecisionPolicy(one_pool=one_pool)),
        )
        for name, found in result.by_model.items():
            tell(replace(found.summary, model=name), as_json=arguments.json)
        if not arguments.json:
            print(f"all models: {result.in_time:.1%} in time, {len(result.changes)} workers changed their model")


def _swinging(arguments: argparse.Namespace, phase: float) -> Iterator[TraceRequest]:
    """The requests for one of several models. `phase`: where its demand begins, as a share of the swing's period."""
    requests, period_s = _requests(arguments, 1.0), arguments.swing
    return requests if period_s is None else paced(requests, swing(period_s, phase))


def _require_plots(arguments: argparse.Namespace) -> None:
    """Raise, before anything is simulated, where plots are asked for and cannot be drawn."""
    if arguments.plot is None:
        raise ValueError("--plot-loads says against which loads to plot; name the file with --plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'legato[dev]'")
    if not arguments.plot.parent.is_dir():
        raise ValueError(f"--plot {arguments.plot}: there is no folder {arguments.plot.parent}")


def _plot(
    arguments: argparse.Namespace,
    records: dict[str, list[RequestRecord]],
    summaries: dict[str, list[tuple[float, Summary]]],
) -> None:
    from cluster.simulation.plots import plot_over_load, plot_over_time  # matplotlib need not be installed

    if arguments.plot_loads:
        plot_over_load(summaries, arguments.plot)
    else:
        plot_over_time(records, arguments.plot)


def _requests(arguments: argparse.Namespace, load: float) -> Iterator[TraceRequest]:
    """The requests at `load` times the load that the arguments ask for."""
    return scaled(
        requests_of(arguments),
        load=arguments.load * load,
        length=arguments.length,
        first=arguments.first,
        limit=arguments.limit,
    )


def requests_of(arguments: argparse.Namespace) -> Iterator[TraceRequest]:
    """The requests of the trace, or drawn ones where there is none; neither scaled nor cut."""
    if arguments.trace is not None:
        return read_trace(arguments.trace, arguments.format)
    workload = Workload(requests_per_s=arguments.rate, num_requests=arguments.requests, burstiness=arguments.burstiness)
    return draw_requests(workload, arguments.seed)


def _config(arguments: argparse.Namespace, *, one_pool: bool) -> SimulationConfig:
    """The cluster that the arguments describe. In one pool, the prefill workers are decode workers too: the same
    devices."""
    num_prefill = 0 if one_pool else arguments.prefill
    shape = _shape(arguments, arguments.device)
    pools = {
        "prefill": replace(shape, token_budget=arguments.prefill_budget),
        "decode": replace(shape, token_budget=arguments.decode_budget),
    }
    shapes = {}
    for entry in arguments.worker or ():
        worker_id, equals, device = entry.partition("=")
        if not equals or device not in DEVICES:
            raise ValueError(
                f"--worker {entry}: write a worker and a device, as in decode-2=l40s; {', '.join(DEVICES)}"
            )
        budget = pools["prefill" if worker_id.startswith("prefill-") else "decode"].token_budget
        shapes[worker_id] = replace(_shape(arguments, device), token_budget=budget)
    slo = SloClass(name="interactive", ttft_s=arguments.ttft_s, tpot_s=arguments.tpot_s, gap_s=arguments.gap_s)
    return SimulationConfig(
        num_prefill=num_prefill,
        num_decode=arguments.decode + arguments.prefill - num_prefill,
        prefill=pools["prefill"],
        decode=pools["decode"],
        shapes=shapes,
        failures=(*map(Kill.parse, arguments.kill or ()), *map(Slow.parse, arguments.slow or ())),
        slo=SloConfig(classes=(slo,), default=slo.name),
        declared_tokens=arguments.declared_tokens,
        max_returns=arguments.returns,
        seed=arguments.seed,
    )


def _shape(arguments: argparse.Namespace, device_name: str) -> WorkerShape:
    """The hardware of a worker on that device; what is stated of costs and room is of the workers on `--device`."""
    model, device, num_devices = MODELS[arguments.model], DEVICES[device_name], arguments.devices_per_worker
    cost, kv_tokens = roofline_cost(model, device, num_devices=num_devices), None
    if device_name == arguments.device:
        cost = _read_cost(arguments.cost) if arguments.cost else cost
        kv_tokens = arguments.kv_tokens
    link = NetworkLink(
        bytes_per_s=arguments.link_gb_per_s * 1e9,
        token_bytes=model.kv_bytes_per_token,
        num_layers=model.num_layers,
    )
    return WorkerShape(
        cost=measured(cost, arguments.noise),
        kv_tokens=kv_tokens or kv_capacity_tokens(model, device, num_devices=num_devices),
        block_size=arguments.block_size,
        handoff_token_s=link.token_bytes / link.num_layers / link.bytes_per_s,
        host_kv_tokens=arguments.host_kv_tokens,
        host_token_s=link.token_bytes / (arguments.host_gb_per_s * 1e9),
        asks_neighbours=arguments.ask_neighbours,
        link=link if arguments.share_links else None,
        step_noise=arguments.noise,
        half_speed_tokens=arguments.half_speed_tokens,
        acceptance=arguments.acceptance,
    )


def _read_cost(path: Path) -> StepCost:
    try:
        return StepCost(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} does not hold the fields of StepCost as JSON: {error}") from error
