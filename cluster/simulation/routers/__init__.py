"""Who places requests in a simulation: Legato's scheduler, and what others publish.

Another rule is a `Baseline` in `cluster.simulation.routers.baselines`; its name stands in `ROUTERS`
(`cluster.simulation.command`), in `ROUTER_NAMES` in the same order (`cluster.simulation.arguments`), in `BASELINES` of
`benchmarks.scheduling.goodput` and in `docs/simulation.md`. One that knows no split is named beside `colocated` in
`cluster.simulation.command` and in `candidates` of `benchmarks.scheduling.goodput_setting`, which also says whether its
engine pulls KV (`PULLS`) or lands it in host memory (`LANDS`), and its limits (`LIMITS`): by default it reserves early.
Its tests are in `test_simulation_baselines.py`.
"""
