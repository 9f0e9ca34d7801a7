"""The configuration: what is refused and how, the shipped files, and the documentation of every setting."""

from __future__ import annotations

import ast
import base64
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import reduce
from pathlib import Path
from typing import Any, get_args

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray import cloudpickle
from ray.serve import Application
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster import app
from cluster.app import build, build_application
from cluster.config import build as build_workers
from cluster.config import build_scheduler
from cluster.config.build import (
    decode_worker,
    engine_config,
    prefill_worker,
    tiers_config,
    transfer_config,
    worker_replica,
)
from cluster.config.build_scheduler import scheduler_policy
from cluster.config.fields import KvMemory, format_size, parse_size
from cluster.config.load import (
    IMPORT_PATH,
    SERVE_NAMES,
    ConfigError,
    LegatoConfig,
    cluster_secret,
    draw_secret,
    give_secret,
    load_config,
    load_document,
)
from cluster.config.settings import NOT_TUNABLE, TUNABLE
from cluster.config.table import setting_rows, settings_table
from cluster.deployment.capacity import pool_name
from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.slo.classes import NO_TARGETS, SloConfig
from engine.cost_model.roofline import H100_SXM, LLAMA_3_1_8B, LLAMA_3_1_70B, ModelShape, predict_memory
from engine.drafting.speculation import SpeculationConfig, drafters_of
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.choose import TransferConfig, TransportKind
from kv_transfer.worker.replica import ReplicaSite

ROOT = Path(__file__).parents[3]
# The others say how a cluster is started: tests/cluster/deployment/test_cluster_files.py.
FILES = [path for path in sorted((ROOT / "ray_configs").glob("*.yaml")) if "\napplications:\n" in path.read_text()]
QWEN3_8B = replace(LLAMA_3_1_8B, name="Qwen3-8B", num_layers=36, intermediate_size=12288, vocab_size=151_936)
GIVEN = "0123456789abcdef"  # the shortest that will do


def served(tree: Mapping[str, Any]) -> str:
    """The text of a Serve config file of Legato with these settings."""
    return yaml.safe_dump({"applications": [{"import_path": IMPORT_PATH, "args": dict(tree)}]})


def test_the_shipped_files_are_there() -> None:
    names = {path.stem for path in FILES}
    assert names >= {"quickstart", "cpu_2p2d", "gpu_1p1d", "gpu_autoscale", "gpu_tensor_parallel", "colocated"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_file_loads(path: Path) -> None:
    load_config(path)
    document = yaml.safe_load(path.read_text())
    schema = ServeDeploySchema.model_validate(document)
    # Serve ignores options that it does not know; a typing error in one must not pass for a setting.
    assert set(document) <= set(ServeDeploySchema.model_fields)
    assert set(document["http_options"]) <= set(type(schema.http_options).model_fields)
    assert set(document["logging_config"]) <= set(type(schema.logging_config).model_fields)
    (application,) = schema.applications
    assert application.import_path == "cluster.app:build" and application.route_prefix == "/"
    assert schema.http_options.host == "127.0.0.1"


def test_what_the_shipped_files_are_for() -> None:
    configs = {path.stem: load_config(path) for path in FILES}
    quickstart = configs["quickstart"]
    assert (quickstart.prefill.replicas, quickstart.decode.replicas, quickstart.is_colocated) == (1, 1, False)
    assert configs["colocated"].is_colocated and not scheduler_policy(configs["colocated"]).decision.one_pool
    auto = configs["auto"]
    assert (auto.prefill.replicas, auto.decode.replicas, auto.is_colocated) == (0, 2, True)
    assert scheduler_policy(auto).decision.one_pool and load_config(auto.model_dump()) == auto
    assert (configs["cpu_2p2d"].prefill.replicas, configs["cpu_2p2d"].decode.replicas) == (2, 2)
    assert configs["gpu_1p1d"].prefill.num_gpus == configs["gpu_1p1d"].decode.num_gpus == 1
    group = configs["gpu_tensor_parallel"]
    assert (group.prefill.num_gpus, group.decode.num_gpus) == (4, 4)
    scaled = configs["gpu_autoscale"]
    assert scaled.prefill.autoscaling is not None and scaled.decode.autoscaling is not None
    assert scaled.prefill.autoscaling != scaled.decode.autoscaling


@pytest.mark.parametrize(
    ("name", "shape", "memory_bytes"),
    [
        ("gpu_tensor_parallel", LLAMA_3_1_70B, 80e9),
        ("gpu_1p1d", QWEN3_8B, 40e9),
        ("gpu_autoscale", QWEN3_8B, 40e9),
    ],
)
def test_the_shipped_files_fit_the_gpus_that_they_are_made_for(
    name: str, shape: ModelShape, memory_bytes: float
) -> None:
    """Each worker has room for the KV of the longest prompt and answer, as a plan would predict it."""
    path = ROOT / "ray_configs" / f"{name}.yaml"
    config = load_config(path)
    gpu = replace(H100_SXM, memory_bytes=memory_bytes)
    assert f"{memory_bytes / 1e9:.0f} GB" in path.read_text().partition("\nproxy_location")[0]
    for role, pool in config.pools.items():
        engine = engine_config(role, config)
        step = engine.largest_step
        memory = predict_memory(
            shape,
            gpu,
            num_devices=int(pool.num_gpus),
            token_budget=step.num_tokens,
            max_num_seqs=step.num_seqs,
            ring_bytes=engine.staging_bytes,
        )
        assert config.model.max_model_len is not None and memory.kv_tokens >= config.model.max_model_len


def test_classes_of_service() -> None:
    assert load_config({}).slo_classes == NO_TARGETS
    assert load_config({"slo": {}}).slo_classes == SloConfig()
    config = load_config(ROOT / "ray_configs" / "slo.yaml")
    interactive, voice, batch = config.slo_classes.classes
    assert (interactive.name, config.slo_classes.default, interactive.has_targets) == (
        "interactive",
        "interactive",
        True,
    )
    assert (voice.name, voice.tpot_s, voice.gap_s) == ("voice", None, 0.4) and interactive.gap_s is None
    assert batch.name == "batch" and not batch.has_targets
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_are_valid_and_frozen() -> None:
    config = load_config({})
    assert config == LegatoConfig() and pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.model.ref = "other"  # type: ignore[misc]


def test_what_every_chat_is_told() -> None:
    """Also what requests have fields of their own for; and it survives Ray, and being written down."""
    told = {"enable_thinking": False, "reasoning_effort": "low", "verbosity": "high", "styles": ["a", 1, None]}
    config = load_config({"model": {"chat_template_kwargs": told}})
    assert config.model.chat_template_kwargs == told and load_config({}).model.chat_template_kwargs == {}
    assert pickle.loads(pickle.dumps(config)) == load_config(config.model_dump()) == config


def test_a_model_in_one_word_is_its_ref() -> None:
    """`serve run cluster.app:build model=NAME`"""
    assert load_config({"model": "gemma3-270m"}) == load_config({"model": {"ref": "gemma3-270m"}})
    with pytest.raises(ConfigError, match=r"model\.ref"):
        load_config({"model": ""})
    assert load_config({"models": ["a", "b"]}) == load_config({"models": [{"model": "a"}, {"model": "b"}]})


def test_an_application_is_built_before_there_is_a_ray() -> None:
    """By its import path `serve run` builds it first, and then starts or joins a Ray."""
    assert not ray.is_initialized()
    assert isinstance(build({"model": "somebody/some-model"}), Application)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("tree", "mentions"),
    [
        ({"prefil": {}}, ("prefil", "did you mean prefill?")),
        ({"kv": {"decode": {"blocksize": 3}}}, ("kv.decode.blocksize", "did you mean block_size?")),
        ({"kv": {"decode": {"zzz": 3}}}, ("kv.decode.zzz", "block_size, memory")),
        ({"decode": {"autoscaling": {"min": 1}}}, ("decode.autoscaling.min", "max_replicas")),
        ({"prefill": {"replicas": -1}}, ("prefill.replicas", "-1")),
        ({"prefill": {"replicas": "2"}}, ("prefill.replicas", "integer", "'2'")),
        ({"prefill": {"replicas": True}}, ("prefill.replicas", "integer")),
        ({"prefill": []}, ("prefill: write settings below it", "[]")),
        ({"decode": {"replicas": 0}}, ("decode.replicas",)),
        (
            {"transfer": {"transport": "nccl"}, "prefill": {"num_gpus": 1}},
            ("transfer.transport is 'nccl'", "decode workers with decode.num_gpus: 0", "leave it at 'auto'"),
        ),
        (
            {"prefill": {"tensor_parallel": 3, "num_gpus": 2}},
            ("prefill.tensor_parallel is 3, but prefill.num_gpus is 2", "set prefill.num_gpus: 3"),
        ),
        (
            {"prefill": {"num_gpus": 4}},
            ("prefill.num_gpus is 4", "the others would be idle", "set prefill.num_gpus: 1, or both to 4"),
        ),
        (
            {"decode": {"num_gpus": 0.5}, "kv": {"decode": {"memory": "45%"}}},
            ("kv.decode.memory is 45%", "decode.num_gpus is 0.5", "a size such as 20GiB, or decode.num_gpus: 1"),
        ),
        (
            {"prefill": {"num_gpus": 0.25}, "decode": {"num_gpus": 0.75}, "kv": {"decode": {"memory": "45%"}}},
            ("kv.decode.memory is 45%", "decode.num_gpus is 0.75"),
        ),
        ({"decode": {"num_gpus": 1.5}}, ("decode.num_gpus is 1.5", "set decode.num_gpus: 1, or both to 2")),
        ({"decode": {"resources": {"gold": -1}}}, ("decode.resources.gold", "greater than or equal to 0")),
        ({"gateway": {"request_deadline_s": 7200}}, ("gateway.request_deadline_s", "less than or equal to 3600")),
        (
            {"gateway": {"request_deadline_s": 30}, "scheduler": {"max_wait_s": 60}},
            ("scheduler.max_wait_s is 60", "gateway.request_deadline_s", "set scheduler.max_wait_s below 30"),
        ),
        (
            {"decode": {"tensor_parallel": 2, "num_gpus": 2}},
            ("decode.tensor_parallel is 2 with GPUs and kv.decode.host_memory", "set kv.decode.host_memory: 0"),
        ),
        (
            {"decode": {"expert_parallel": True}},
            ("decode.expert_parallel is on, but decode.tensor_parallel is 1", "leave expert_parallel out"),
        ),
        ({"prefill": {"tensor_parallel": 2, "expert_parallel": "yes"}}, ("prefill.expert_parallel", "boolean")),
        ({"model": {"dtype": "float64"}}, ("model.dtype", "float32", "bfloat16")),
        (
            {"model": {"chat_template_kwargs": {"tools": []}}},
            ("model.chat_template_kwargs: 'tools' is not told in this way",),
        ),
        ({"model": {"chat_template_kwargs": {"numbers": [0] * 257}}}, ("model.chat_template_kwargs", "256 values")),
        (
            {"model": {"chat_template_kwargs": {"today": date(2026, 1, 1)}}},
            ("model.chat_template_kwargs: Object of type date is not JSON", "write texts, numbers"),
        ),
        (
            {"model": {"chat_template_kwargs": {"size": float("nan")}}},
            ("model.chat_template_kwargs: Out of range float",),
        ),
        ({"model": {"chat_template_kwargs": ["a"]}}, ("model.chat_template_kwargs: write a mapping",)),
        ({"kv": {"decode": {"memory": "2 GB"}}}, ("kv.decode.memory", "2GiB", "4096 blocks")),
        ({"kv": {"decode": {"memory": 0}}}, ("kv.decode.memory", "larger than nothing")),
        ({"gateway": {"max_body_bytes": "much"}}, ("gateway.max_body_bytes", "512MiB")),
        ({"gateway": {"request_deadline_s": float("nan")}}, ("gateway.request_deadline_s",)),
        ({"transfer": {"lease_ttl_s": 5}}, ("transfer.lease_ttl_s is no setting; there are transport",)),
        ({"gateway": {"max_unread_bytes": 1}}, ("gateway.max_unread_bytes is no setting; there are replicas",)),
        ({"tuning": {"Config": {}}}, ("tuning names Config", "DecodeWorkerConfig, EngineConfig")),
        (
            {"tuning": {"OrchestratorConfig": {"request_deadline_s": 30}}},
            ("tuning.OrchestratorConfig.request_deadline_s is no constant", "set gateway.request_deadline_s"),
        ),
        (
            {"tuning": {"SchedulerPolicy": {"admission": {"max_wait_s": 900}}}},
            ("tuning.SchedulerPolicy.admission.max_wait_s is no constant", "set scheduler.max_wait_s"),
        ),
        (
            {"tuning": {"SchedulerPolicy": {"admission": {"max_wait_s": None}}}},
            ("tuning.SchedulerPolicy.admission.max_wait_s is no constant", "set scheduler.max_wait_s"),
        ),
        (
            {"kv": {"layerkv": "off"}, "tuning": {"DecodeWorkerConfig": {"layerkv": {"max_in_flight": 4}}}},
            ("tuning.DecodeWorkerConfig.layerkv is no constant", "set kv.layerkv"),
        ),
        (
            {"tuning": {"DecodeWorkerConfig": {"speculation": None}}},
            ("tuning.DecodeWorkerConfig.speculation is no constant", "set decode.speculation"),
        ),
        (
            {"tuning": {"EngineConfig": {"largest_step": {"num_tokens": 1}}}},
            ("tuning.EngineConfig.largest_step is no constant", "set prefill.chunk_tokens and decode.chunk_tokens and"),
        ),
        (
            {"tuning": {"TransferConfig": {"transport": "nccl"}}},
            ("tuning.TransferConfig.transport is no constant", "set transfer.transport"),
        ),
        ({"decode": {"autoscaling": {"min_replicas": 2}}}, ("decode.autoscaling.max_replicas", "missing")),
        ({"decode": {"autoscaling": {"max_replicas": 2, "policy": "load"}}}, ("decode.autoscaling.policy",)),
        ({"prefill": {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}}, ("prefill.autoscaling", "use 1")),
        ({"prefill": {"replicas": 0}, "scheduler": {"role_flips": True}}, ("scheduler.role_flips", "prefill.replicas")),
        (
            {"prefill": {"num_gpus": 1}, "scheduler": {"role_flips": True}},
            ("scheduler.role_flips is on, but decode.num_gpus is 0 while the other pool has GPUs", "leave it off"),
        ),
        (
            {
                "models": [{"model": "a"}, {"model": "b", "decode": {"num_gpus": 1}}],
                "scheduler": {"role_flips": True},
            },
            ("scheduler.role_flips is on, but models.1.prefill.num_gpus is 0",),
        ),
        (
            {"decode": {"autoscaling": {"min_replicas": 3, "max_replicas": 2}}},
            ("decode.autoscaling", "min_replicas is 3", "max_replicas 2"),
        ),
        (
            {"prefill": {"replicas": 5, "autoscaling": {"max_replicas": 2}}},
            ("prefill.replicas is 5", "1 to 2"),
        ),
        (
            {"model": {"batch_invariant": True}, "prefill": {"num_gpus": 1}},
            ("model.batch_invariant", "decode.num_gpus is 0"),
        ),
        ({"workers": 3, "decode": {"replicas": 2}}, ("workers is 3", "decode.replicas is given", "leave out")),
        ({"workers": 3, "prefill": {"replicas": 1}}, ("workers is 3", "prefill.replicas is given", "leave out")),
        ({"workers": 3, "prefill": None}, ("prefill is empty; give it a value, or leave the line out",)),
        ({"model": None}, ("model is empty; give it a value, or leave the line out",)),
        ({"kv": {"decode": {"memory": None}}}, ("kv.decode.memory is empty",)),
        ({"prefill": 2}, ("prefill: write settings below it, of num_cpus, num_gpus", "not 2")),
        ({"models": "a/b"}, ("models: write a list, such as [a/b], not 'a/b'",)),
        ({"gateway": {"cors_origins": "https://x"}}, ("gateway.cors_origins: write a list, such as [https://x]",)),
        ({"slo": {"classes": {"a": {"service_tiers": "flex"}}}}, ("service_tiers: write a list, such as [flex]",)),
        ({"slo": {"classes": ["a"]}}, ("slo.classes: write a mapping, such as {NAME: ...}, not ['a']",)),
        (
            {"decode": {"resources": {"GPU": 1}}},
            ("decode.resources: GPU: no custom resource", "or num_gpus instead"),
        ),
        (
            {"kv": {"decode": {"memory": 90}}},
            ("kv.decode.memory: 90 is a number of bytes", "did you mean 90%, or 90GiB?"),
        ),
        ({"kv": {"decode": {"host_memory": "20"}}}, ("kv.decode.host_memory: 20 is a number of bytes", "mean 20%")),
        ({"kv": {"decode": {"memory": 4096}}}, ("4096 is a number of bytes, which holds no KV; write its unit",)),
        ({"model": "."}, ("model: ref is '.'", "give a served_name")),
        ({"model": {"ref": "models/x", "served_name": ".."}}, ("model: ref is 'models/x'",)),
        ({"network": {"host": "0.0.0.0"}}, ("network.host: 0.0.0.0 is every address", "write node")),
        ({"network": {"host": "Node"}}, ("network.host: Node is no address", "or node, for each node's own")),
        ({"wait_for_nodes": True}, ("wait_for_nodes is on, but network.host is 127.0.0.1", "set network.host: node")),
        ({"slo": {"classes": {"büro": {}}, "default": "büro"}}, ("slo", "'büro' cannot", "ASCII")),
        ({"slo": {"classes": {"a\nb": {}}, "default": "a\nb"}}, ("slo", "'a\\nb' cannot")),
        ({"slo": {"clases": {}}}, ("slo.clases", "did you mean classes?")),
        ({"slo": {"classes": {"chat": {"ttft_m": 5}}}}, ("slo.classes.chat.ttft_m", "did you mean ttft_ms?")),
        ({"slo": {"classes": {"chat": {}}}}, ("slo: the default SLO class is 'interactive'", "there are chat")),
        ({"slo": {"classes": {"a": {"share": 1}}, "default": "a"}}, ("slo.classes.a.share", "less than 1")),
        (
            {"model": {"max_model_len": 32}, "kv": {"prefill": {"block_size": 64}}},
            ("kv.prefill.block_size is 64", "max_model_len (32)"),
        ),
        ({"models": [{"model": "a"}], "model": "b"}, ("models is given, and so is model", "in models")),
        ({"models": [{"model": "a"}], "kv": {}, "decode": {}}, ("models is given, and so are decode, kv",)),
        (
            {"models": [{"model": "x/a"}, {"model": {"ref": "b", "served_name": "x/a"}}]},
            ("models.1.model is named x/a, and so is models.0.model", "served_name"),
        ),
        (
            {"models": [{"model": name, "adapters": {"folder": "/a"}} for name in "ab"]},
            ("models.1.adapters.folder is that of models.0, too",),
        ),
        (
            {"models": [{"model": f"x{end}y", "adapters": {"folder": f"/a{end}"}} for end in ("", "/")]},
            ("models.1.adapters.folder is that of models.0, too",),
        ),
        ({"models": [{"model": "a", "gateway": {}}]}, ("models.0.gateway is no setting", "model, adapters, kv")),
        ({"models": [{"decode": {"replica": 2}}]}, ("models.0.decode.replica", "did you mean replicas?")),
        ({"models": [{"workers": 3, "decode": {"replicas": 2}}]}, ("models.0: workers is 3", "decode.replicas")),
        (
            {"models": [{"model": "a"}, {"model": {"ref": "b", "max_model_len": 4}}]},
            ("models.1.kv.prefill.block_size is 16, more than models.1.model.max_model_len (4)",),
        ),
        (
            {"models": [{"model": "a", "prefill": {"replicas": 0}}], "scheduler": {"role_flips": True}},
            ("scheduler.role_flips",),
        ),
        ({"model": "a", "scheduler": {"model_flips": True}}, ("scheduler.model_flips is on", "no two models")),
        (
            {
                "models": [{"model": "a"}, {"model": "b", "decode": {"autoscaling": {"max_replicas": 2}}}],
                "scheduler": {"model_flips": True},
            },
            ("scheduler.model_flips is on, but models.1.decode.autoscaling is given",),
        ),
    ],
)
def test_nonsense_is_refused_with_advice(tree: dict[str, Any], mentions: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    for mention in mentions:
        assert mention in str(caught.value)


@pytest.mark.parametrize(
    "pools",
    [
        {"prefill": {"replicas": 0, "num_gpus": 0.5}, "kv": {"prefill": {"memory": "45%"}}},
        {"decode": {"num_gpus": 0.9}, "kv": {"decode": {"memory": "80%"}}},
        {"workers": 2, "decode": {"num_gpus": 0.75}, "kv": {"decode": {"memory": "80%"}}},
    ],
)
def test_a_share_of_a_gpu_is_given_where_no_second_worker_fits(pools: dict[str, Any]) -> None:
    assert load_config(pools).pools


def test_each_of_several_models_reads_as_if_it_were_the_only_one() -> None:
    trees: list[dict[str, Any]] = [
        {"model": "a", "workers": 2},
        {"model": {"ref": "b", "dtype": "float32"}, "decode": {"replicas": 3}, "kv": {"decode": {"block_size": 32}}},
    ]
    shared = {"gateway": {"replicas": 2}, "slo": {}, "tuning": {"EngineConfig": {"activation_bits": 16}}}
    config = load_config({"models": trees, **shared})
    assert config.served == tuple(load_config({**tree, **shared}) for tree in trees)
    assert [served.model.name for served in config.served] == ["a", "b"] and config.names == "a, b"
    assert [engine_config("decode", served).block_size for served in config.served] == [16, 32]
    assert [scheduler_policy(served).decision.one_pool for served in config.served] == [True, False]
    alone = load_config({"model": "a"})
    assert alone.served == (alone,)


def test_a_worker_takes_on_no_model_whose_workers_have_other_resources_of_ray() -> None:
    """They are kept to nodes of one kind, of which its own is none."""
    alone: dict[str, Any] = {"prefill": {"replicas": 0}}
    trees = [{"model": "a", **alone}, {"model": "b", **alone, "decode": {"resources": {"large": 1}}}]
    first, second = load_config({"models": trees}).served
    site = ReplicaSite(name="r", node_id="node", host="127.0.0.1", secret=bytes(32))

    async def nowhere() -> Endpoint:
        raise OSError

    assert not worker_replica("decode", first, [second], site, nowhere).change_role("decode", 0.0, "b")


def test_several_models_are_pools_of_one_application() -> None:
    """Each with a name of its own, whatever is in it."""
    models = [{"model": name, "workers": 1} for name in ("x/a", "x-a")]
    assert isinstance(build_application(load_config({"models": models})), Application)


def test_the_first_model_s_pools_are_called_as_where_it_is_alone() -> None:
    """So that Serve keeps its workers where another model comes beside it, or goes."""
    alone = load_config({"model": "a"})
    both = load_config({"models": [{"model": "a"}, {"model": "x/b"}]})
    names = [[pool_name("prefill", both, served), pool_name("decode", both, served)] for served in both.served]
    assert names == [["PrefillWorker", "DecodeWorker"], ["PrefillWorker-x%2Fb", "DecodeWorker-x%2Fb"]]
    assert names[0] == [pool_name("prefill", alone, alone), pool_name("decode", alone, alone)]


def test_batch_invariance_may_be_asked_of_cpus() -> None:
    """Whether this machine's have such kernels is for its workers to say."""
    assert load_config({"model": {"batch_invariant": True}}).model.batch_invariant


def test_settings_of_prefill_workers_that_there_are_none_of() -> None:
    """They are told, change nothing, and a dump of them all is not taken for what was given."""
    pool = {"num_gpus": 1, "chunk_tokens": 100_000}
    given: dict[str, Any] = {"prefill": pool, "kv": {"prefill": {"memory": "2GiB"}, "decode": {"memory": "2GiB"}}}
    names = "kv.prefill.memory, prefill.chunk_tokens, prefill.num_gpus: nobody heeds it"
    one_type, colocated = (
        load_config({"workers": 2, **given}),
        load_config(given | {"prefill": {"replicas": 0, **pool}}),
    )
    for config, why in ((one_type, "of workers there is one type"), (colocated, "prefill.replicas is 0")):
        assert list(config.unheeded()) == [f"{names}, as {why}; decode and kv.decode say what each worker has"]
        alone = load_config({"prefill": {"replicas": 0}})
        assert transfer_config(config) == transfer_config(alone)
        assert engine_config("decode", config).largest_step == engine_config("decode", alone).largest_step
    (told,) = load_config({"models": ["a", {"model": "b", "workers": 1, "prefill": pool}]}).unheeded()
    assert told.startswith("models.1.prefill.chunk_tokens, models.1.prefill.num_gpus: nobody heeds it, as of models.1.")
    for tree in {}, {"workers": 2}, given, load_config({"workers": 2}).model_dump():
        assert not list(load_config(tree).unheeded())


@pytest.mark.parametrize(
    "tree", [{"workers": 0}, {"workers": "2"}, {"workers": True}, {"kv": {"decode": {"memory": -5}}}, {"log_level": 1}]
)
def test_a_problem_is_told_once(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"the configuration: {next(iter(tree))}") and line.count("4096 blocks") <= 1


def test_words_that_are_meant_all_the_same() -> None:
    assert load_config({"log_level": "info"}) == load_config({"log_level": "INFO"})
    assert load_config({"gateway": {"storage": ""}}).gateway.storage is None
    assert load_config({"model": {"ref": "a", "served_name": ""}}).model.name == "a"
    assert load_config({"decode": {"draft_model": ""}, "adapters": {"folder": ""}}) == load_config({})


def test_every_problem_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"prefill": {"replicas": -1}, "decode": {"replica": 2}})
    assert len(str(caught.value).splitlines()) == 2


def test_a_secret_stands_in_no_file() -> None:
    """Ray's dashboard would show it."""
    for tree in {"secret": "hush-hush-hush-hush"}, {"secret": None}, {"secret": "hush", "decode": {"replicas": -1}}:
        with pytest.raises(ConfigError, match="LEGATO_SECRET") as caught:
            load_config(tree)
        assert "hush" not in str(caught.value)


def test_a_secret_comes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_SECRET", GIVEN)
    assert draw_secret() is None and cluster_secret(None) == GIVEN.encode()
    give_secret()
    assert cluster_secret(None) == GIVEN.encode()
    for short in (GIVEN[:-1], GIVEN[0]):
        monkeypatch.setenv("LEGATO_SECRET", short)
        for use in (draw_secret, give_secret, lambda: cluster_secret(None)):
            with pytest.raises(ConfigError, match=f"has {len(short)} bytes.*openssl rand"):
                use()


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_secret_is_drawn_where_none_is_given(monkeypatch: pytest.MonkeyPatch, nothing: str | None) -> None:
    if nothing is None:
        monkeypatch.delenv("LEGATO_SECRET", raising=False)
    else:
        monkeypatch.setenv("LEGATO_SECRET", nothing)
    one, other = draw_secret(), draw_secret()
    assert one is not None and other is not None
    assert len(cluster_secret(one)) == 32 and cluster_secret(one) != cluster_secret(other)
    assert cluster_secret(one).hex() not in repr(one) and repr(cluster_secret(one)) not in repr(one)
    with pytest.raises(ConfigError, match="every node"):
        cluster_secret(None)
    give_secret()  # to the Ray that is started then
    assert draw_secret() is None and len(cluster_secret(None)) == 64


@pytest.mark.parametrize("colocated", [False, True])
def test_a_given_secret_is_no_deployments_argument(monkeypatch: pytest.MonkeyPatch, colocated: bool) -> None:
    """Serve keeps these, pickled, in its checkpoints."""
    monkeypatch.setenv("LEGATO_SECRET", GIVEN)
    config = load_config({"prefill": {"replicas": 0 if colocated else 1}})
    kept = cloudpickle.dumps(build_application(config))
    assert kept.count(b"LegatoConfig") > 0
    raw = GIVEN.encode()
    assert not [form for form in (raw, raw.hex().encode(), base64.b64encode(raw)) if form in kept]


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("a: [", "no YAML"),
        ("- 1", "mapping"),
        ("applications: []", "exactly one application"),
        ("applications: [{args: 5}]", "applications[0].args"),
        ("applications: [{args: {nonsense: 1}}]", "nonsense is no setting"),
        ("kv: {}\ndecode: {replicas: 2}\nkv: {layerkv: 'off'}", "line 3: kv is there twice"),
        (
            "applications:\n- args:\n    decode:\n      replicas: 1\n      replicas: 2",
            "line 5: replicas is there twice",
        ),
    ],
)
def test_bad_files(tmp_path: Path, text: str, mention: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert mention in str(caught.value) and str(path) in str(caught.value)


def test_what_serve_heeds_is_known() -> None:
    """A name that it has gained would be refused, and one that it has lost would pass."""
    schemas = {(): ServeDeploySchema, ("http_options",): HTTPOptionsSchema, ("applications", 0): ServeApplicationSchema}
    assert {path: set(schema.model_fields) for path, schema in schemas.items()} == SERVE_NAMES


QUICKSTART = (ROOT / "ray_configs" / "quickstart.yaml").read_text()


@pytest.mark.parametrize(
    ("before", "after", "mentions"),
    [
        (
            "http_options:",
            "http_option:",
            ("line 5: http_option is no option of Serve's", "did you mean http_options?"),
        ),
        ("proxy_location:", "proxy_locatoin:", ("line 4: proxy_locatoin is", "did you mean proxy_location?")),
        ("controller_options:", "controller_option:", ("controller_option is", "did you mean controller_options?")),
        ("port: 8000", "prt: 8000", ("line 5: http_options.prt is no option", "did you mean port?")),
        ("port: 8000", "port: eighty", ("line 5: http_options.port is 'eighty'",)),
        (
            "port: 8000",
            "ssl_keyfile: k.pem, ssl_certfile: c.pem",
            ("line 5: http_options has ssl_keyfile and ssl_certfile", "end TLS in a proxy of your own"),
        ),
        ("app:build", "appp:build", ("import_path is cluster.appp:build; that of Legato is cluster.app:build",)),
        ("    import_path: cluster.app:build\n", "", ("applications[0].import_path is missing",)),
        (
            "    args:\n",
            "    decode: {replicas: 2}\n    args:\n",
            ("line 25: applications[0].decode is", "put it below `args` of the application"),
        ),
        ("applications:\n", "model: {ref: other}\napplications:\n", ("line 21: model is no", "put it below `args`")),
        ("    args:\n", "    args:\n    envs:\n", ("applications[0].args is empty", "envs is no option of Serve's")),
    ],
)
def test_what_ray_would_ignore_is_refused(tmp_path: Path, before: str, after: str, mentions: tuple[str, ...]) -> None:
    """A setting beside `args` would serve another model than the one that is meant."""
    assert before in QUICKSTART
    path = tmp_path / "served.yaml"
    path.write_text(QUICKSTART.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        load_document(path)
    for mention in mentions:
        assert mention in str(caught.value)


@pytest.mark.parametrize("text", ["", "model: {ref: gemma3-270m}"])
def test_what_serve_cannot_run_is_no_document(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"no `applications`: put them under `applications\[0\]\.args`"):
        load_document(path)


def test_the_rest_of_a_file_is_told_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(QUICKSTART.replace("port: 8000", "prt: 1").replace("kv:", "kvs:"))
    with pytest.raises(ConfigError) as caught:
        load_document(path)
    first, second = str(caught.value).splitlines()
    assert "line 5: http_options.prt" in first and "line 28: kvs is no setting" in second


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {max_model_len: 010000}", "line 1: YAML reads 010000 as 4096, of base 8"),
        ("decode:\n  max_num_seqs: 1:30", "line 2: YAML reads 1:30 as 90, of base 60"),
        ("on: 1", "line 1: on is no text, YAML reads it as True"),
        ("kv:\n  1: {}", "line 2: 1 is no text, YAML reads it as 1"),
    ],
)
def test_what_yaml_reads_as_something_else_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert told in str(caught.value)


def test_parts_of_a_file_may_be_used_again(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("prefill: &pool {threads: 2}\ndecode: {<<: *pool, threads: 3}\nkv: {prefill: &a {}, decode: *a}\n")
    config = load_config(path)
    assert (config.prefill.threads, config.decode.threads) == (2, 3)


def test_a_serve_config_file_may_hold_parts_that_it_uses_again(tmp_path: Path) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(
        f"x-pool: &pool {{threads: 2}}\n{QUICKSTART}      gateway: {{replicas: 1}}\n".replace(
            "prefill: {replicas: 1, num_cpus: 0.2, threads: 1}", "prefill: *pool"
        )
    )
    assert load_config(path).prefill.threads == 2


OTHER = "  - {name: other, route_prefix: /other, import_path: 'other:app', args: {model: 5}}\n"


def test_legato_is_found_beside_other_applications(tmp_path: Path) -> None:
    path, text = tmp_path / "served.yaml", QUICKSTART.replace("applications:\n", f"applications:\n{OTHER}")
    path.write_text(text)
    assert load_document(path)[1] == load_config(ROOT / "ray_configs" / "quickstart.yaml")
    path.write_text(text.replace("kv:", "kvs:").replace("    args:\n", "    envs:\n    args:\n"))
    with pytest.raises(ConfigError) as caught:
        load_document(path)
    first, second = str(caught.value).splitlines()
    assert "line 26: applications[1].envs is no option" in first and "line 30: kvs is no setting" in second
    path.write_text(f"applications:\n{OTHER}{OTHER}")
    with pytest.raises(ConfigError, match="line 2: `applications` must be a list of exactly one application, Legato"):
        load_document(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_a_bare_tree_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.yaml"
    path.write_text("kv: {decode: {memory: 100 blocks}}")
    assert load_config(path).kv.decode.memory == KvMemory(num_blocks=100)
    path.write_text("")
    assert load_config(str(path)) == LegatoConfig()


@pytest.mark.parametrize(
    ("text", "num_bytes"), [(5, 5), ("5", 5), ("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("8KiB", 2**13), ("7B", 7)]
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes == parse_size(format_size(num_bytes))


def test_names_of_models() -> None:
    def name(**model: str) -> str:
        return load_config({"model": model}).model.name

    assert name(ref="/models/tiny-llama/") == "tiny-llama"
    assert name(ref="Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert name(ref="./x", served_name="chat") == "chat"


def test_what_is_no_setting_is_a_constant() -> None:
    decode = decode_worker(load_config({}))
    assert (decode.lease_ttl_s, decode.reserve_wait_s, decode.calibration_s, decode.max_waiting) == (10, 60, 2, 256)
    prefill = prefill_worker(load_config({}))
    assert (prefill.calibration_s, prefill.max_waiting, prefill.heartbeat_s, decode.heartbeat_s) == (2, 256, 0.5, 0.5)
    assert prefill.kept_s == 60
    assert decode.overlap_steps is None and decode.layerkv is not None and decode.layerkv.max_in_flight == 256
    wide = decode_worker(load_config({"decode": {"max_num_seqs": 300}}))
    assert wide.layerkv is not None and wide.layerkv.max_in_flight == 300
    engine = engine_config("decode", load_config({}))
    assert (engine.ring_groups, engine.layers_per_group, engine.activation_bits) == (2, None, 8)
    assert (engine.share_weights, engine.decode_graphs) == ("auto", True)
    assert scheduler_policy(load_config({})).stale_after_s == 3
    assert (OrchestratorConfig().max_attempts, OrchestratorConfig().silence_s) == (4, 1.5)
    cpu, gpu = transfer_config(load_config({})), transfer_config(load_config({"prefill": {"num_gpus": 1}}))
    assert (cpu.slab_bytes, cpu.num_slabs, cpu.num_connections, cpu.digest) == (8 * 2**20, 8, 2, "auto")
    assert (cpu.silence_s, tiers_config("prefill", load_config({})).load_timeout_s) == (2, 2)
    assert (gpu.slab_bytes, gpu.num_slabs, gpu.num_connections) == (32 * 2**20, 16, 4)


@pytest.mark.parametrize(("deadline_s", "wait_s"), [(600, 60), (60, 30), (30, 15)])
def test_who_waits_for_room_hears_of_it_before_the_deadline(deadline_s: float, wait_s: float) -> None:
    config = load_config({"gateway": {"request_deadline_s": deadline_s}})
    assert scheduler_policy(config).admission.max_wait_s == wait_s
    assert load_config(config.model_dump()) == config


def test_tuning_changes_a_constant_of_a_whole_cluster() -> None:
    tuning = {
        "DecodeWorkerConfig": {"reserve_wait_s": 240.0},
        "TiersConfig": {"host_folder": "/mnt", "load_timeout_s": 60.0},
        "TransferConfig": {"silence_s": 60.0},
    }
    config = load_config({"tuning": tuning})
    assert pickle.loads(pickle.dumps(config)) == config
    assert decode_worker(config).reserve_wait_s == 240 and decode_worker(config).lease_ttl_s == 10
    assert prefill_worker(config).kept_s == 240, "a prompt is kept for as long as its reservation waits"
    tiers = tiers_config("prefill", config)
    assert (tiers.host_folder, tiers.load_timeout_s) == ("/mnt", 60) and transfer_config(config).silence_s == 60
    with pytest.raises(ValueError, match=r"tuning\.DecodeWorkerConfig has reserve, but the fields"):
        decode_worker(load_config({"tuning": {"DecodeWorkerConfig": {"reserve": 1}}}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"reserve_wait_s": "240"}, r"tuning\.DecodeWorkerConfig\.reserve_wait_s: .*number, but it is '240'"),
        ({"max_waiting": 2.5}, r"tuning\.DecodeWorkerConfig\.max_waiting: .*integer"),
        ({"overlap_steps": 1}, r"tuning\.DecodeWorkerConfig\.overlap_steps: .*boolean"),
    ],
)
def test_tuning_takes_no_value_of_another_type(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode_worker(load_config({"tuning": {"DecodeWorkerConfig": changes}}))


def test_tuning_takes_no_value_that_its_class_refuses() -> None:
    with pytest.raises(ValueError, match=r"tuning\.LayerKvConfig: .*at least 1"):
        decode_worker(load_config({"tuning": {"LayerKvConfig": {"max_in_flight": 0}}}))


def test_tuning_makes_of_a_value_what_the_field_is_of() -> None:
    config = load_config({"tuning": {"DecodeWorkerConfig": {"reserve_wait_s": 240, "overlap_steps": None}}})
    assert repr(decode_worker(config).reserve_wait_s) == "240.0"
    speculation = load_config({"tuning": {"SpeculationConfig": {"drafters": ["lookup"]}}})
    assert decode_worker(speculation).speculation == SpeculationConfig(drafters=("lookup",))


def test_tuning_within_a_value_leaves_the_rest_of_it_as_it_is_set() -> None:
    tuning = {"SchedulerPolicy": {"admission": {"max_contenders": 2}, "decision": {"max_room_s": 3}}}
    scheduler = {"max_queued_tokens": 5000, "max_wait_s": 10}
    policy = scheduler_policy(load_config({"workers": 2, "scheduler": scheduler, "tuning": tuning}))
    assert (policy.admission.max_contenders, policy.decision.max_room_s) == (2, 3)
    assert (policy.admission.max_queued_tokens, policy.admission.max_wait_s) == (5000, 10)
    assert policy.decision.one_pool
    with pytest.raises(ValueError, match=r"tuning\.SchedulerPolicy\.decision has room, but the fields of Decision"):
        scheduler_policy(load_config({"tuning": {"SchedulerPolicy": {"decision": {"room": 1}}}}))
    with pytest.raises(ValueError, match=r"tuning\.SchedulerPolicy\.decision: .*, but it is 3"):
        scheduler_policy(load_config({"tuning": {"SchedulerPolicy": {"decision": 3}}}))


def test_what_tuning_refuses_are_fields_and_settings() -> None:
    config = load_config({"kv": {"layerkv": "auto"}})
    decode, engine, tiers = decode_worker(config), engine_config("decode", config), tiers_config("decode", config)
    parts = [OrchestratorConfig(), scheduler_policy(config), prefill_worker(config), decode, engine, tiers]
    made = {type(part).__name__: part for part in (*parts, decode.layerkv, transfer_config(config))}
    settings = {path for path, _, _, _ in setting_rows()}
    for path, told in NOT_TUNABLE.items():
        name, *fields = path.split(".")
        reduce(getattr, fields, made[name])
        assert settings.issuperset(told.split(" and "))
        changes: Any = None
        for field in reversed(fields):
            changes = {field: changes}
        with pytest.raises(ConfigError, match=rf"tuning\.{path} is no constant but a setting; set {told}"):
            load_config({"tuning": {name: changes}})


def _handed_on(call: ast.Call, path: str) -> Iterator[str]:
    """The fields of a component's config that are filled from settings, by the names of `NOT_TUNABLE`."""
    for keyword in call.keywords:
        field = f"{path}.{keyword.arg}"
        if isinstance(keyword.value, ast.Call) and keyword.value.keywords:  # a config within it
            yield from _handed_on(keyword.value, field)
        elif any(isinstance(node, ast.Attribute) for node in ast.walk(keyword.value)):
            yield field


# What follows from settings and from constants, which `tuning` may overrule.
_FOLLOWS = {"PrefillWorkerConfig.max_slab_bytes", "PrefillWorkerConfig.kept_s", "DecodeWorkerConfig.max_slab_bytes"}
_FOLLOWS |= {"EngineConfig.decode_graphs", "LayerKvConfig.max_in_flight"}


def test_what_settings_say_is_not_to_be_tuned() -> None:
    """Or a setting would be overruled unheard."""
    calls = [
        node
        for module in (build_workers, build_scheduler, app)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TUNABLE
    ]
    handed_on = {path for call in calls for path in _handed_on(call, ast.unparse(call.func))}
    assert handed_on - NOT_TUNABLE.keys() == _FOLLOWS


@pytest.mark.parametrize("config", [OrchestratorConfig(), transfer_config(load_config({}))])
def test_nobody_who_is_well_counts_as_silent(config: OrchestratorConfig | TransferConfig) -> None:
    """A peer pings every half second: with less than that every worker would be left by every request."""
    name = type(config).__name__
    with pytest.raises(ValueError, match=rf"tuning\.{name}: silence_s is 0\.5, but .* one ping to the next"):
        load_config({"tuning": {name: {"silence_s": 0.5}}}).tuned(config)


def test_who_guesses_tokens() -> None:
    assert decode_worker(load_config({})).speculation == SpeculationConfig()
    assert decode_worker(load_config({"decode": {"speculation": "off"}})).speculation is None
    tuning = {"SpeculationConfig": {"fixed": 3, "drafters": ["prediction"]}}
    made = decode_worker(load_config({"tuning": tuning})).speculation
    assert made is not None and made.fixed == 3
    assert [drafter.name for drafter in drafters_of(made.drafters)] == ["prediction"]


def test_who_loads_a_draft_model() -> None:
    wanted = {"draft_model": "/models/small"}
    assert engine_config("decode", load_config({})).draft_ref is None
    config = load_config({"decode": wanted})
    assert engine_config("decode", config).draft_ref == "/models/small"
    assert engine_config("prefill", config).draft_ref is None
    flipping = load_config({"decode": wanted, "scheduler": {"role_flips": True}})
    assert engine_config("prefill", flipping).draft_ref == "/models/small"
    assert engine_config("decode", load_config({"decode": wanted | {"speculation": "off"}})).draft_ref is None


CHOICES = [(path, choice) for path, kind, _, _ in setting_rows() for choice in re.findall(r"`([^`]+)`", kind)]


def test_each_transport_there_is_can_be_chosen() -> None:
    assert {choice for path, choice in CHOICES if path == "transfer.transport"} == set(get_args(TransportKind))


@pytest.mark.parametrize(("path", "choice"), CHOICES)
def test_each_choice_can_be_written_as_the_guide_writes_it(path: str, choice: str) -> None:
    """YAML reads some words as truth values where they stand without quotes."""
    on_gpus = "prefill: {num_gpus: 1}\ndecode: {num_gpus: 1}\n" if choice in ("cuda_ipc", "nccl") else ""
    branches = path.replace(".", ": {")
    config = load_config(yaml.safe_load(f"{on_gpus}{branches}: {choice}{'}' * path.count('.')}"))
    assert reduce(getattr, path.split("."), config) == choice  # type: ignore[comparison-overlap]


def test_every_setting_is_described() -> None:
    rows = list(setting_rows())
    assert all(description.endswith(".") for _, _, _, description in rows)
    assert all("branch" not in kind for path, kind, _, _ in rows if not path.endswith((".autoscaling", ".disk", "slo")))


def test_the_documentation_has_every_setting() -> None:
    documentation = (ROOT / "docs" / "guide" / "configuration.md").read_text()
    assert settings_table() in documentation, "run `python -m cluster.config.table` and put its table there"
