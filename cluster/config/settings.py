"""Legato's configuration: one frozen tree, checked once when it is loaded and never written back.

The tree is what `args` of the application in a Serve config file holds (see `ray_configs/`); `cluster.config.load`
loads it. An application of several models has a branch for each, and `LegatoConfig.served` a tree for each, which reads
as that of one model alone. Knows what is plausible in itself; what depends on the model or the machine (does the
context fit the KV memory?) is checked when a worker starts. `docs/guide/configuration.md` has a table of every setting,
which a test compares with this file.

What no operator has a reason to turn is a constant: a default of the component configs, or a named value in
`cluster.config.build`. `tuning` changes these for a test of a whole cluster, or for an experiment.

To add a setting, write a field here and hand it on in `cluster.config.build` (workers) or
`cluster.config.build_scheduler` to a field of the component's own config; the gateway has these settings whole. Where
that config is one of `TUNABLE`, name its field in `NOT_TUNABLE` as well. What Ray has to know goes through
`cluster.deployment`. `python -m cluster.config.table` prints the guide's table anew. Tests: `test_config.py`.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cluster.config.fields import BudgetField, KvMemory, KvMemoryField, OrNothing, OrOff, Settings, SizeBytes
from cluster.http.openai.fields import WITHOUT_DEFAULT, template_kwargs
from cluster.slo.classes import BATCH, INTERACTIVE, NO_TARGETS, SloClass, SloConfig
from engine.text.formats import ReasoningFormatName, ToolFormatName
from kv_transfer.tiers.config import Budget

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from engine.checkpoint.quantisation import Quantisation
    from kv_transfer.messages.fields import Role

SCHEDULER_CPUS: Final = 0.1
"""CPUs, in Ray's books, that are set aside for the global scheduler."""

TUNABLE: Final = {
    "DecodeWorkerConfig",
    "EngineConfig",
    "HttpLimits",
    "LayerKvConfig",
    "OrchestratorConfig",
    "PrefillWorkerConfig",
    "SchedulerPolicy",
    "SpeculationConfig",
    "TiersConfig",
    "TransferConfig",
}
"""Classes of component configs that `tuning` can change."""

NOT_TUNABLE: Final = {
    "DecodeWorkerConfig.layerkv": "kv.layerkv",
    "DecodeWorkerConfig.max_num_seqs": "decode.max_num_seqs",
    "DecodeWorkerConfig.speculation": "decode.speculation",
    "DecodeWorkerConfig.token_budget": "decode.chunk_tokens",
    "EngineConfig.backend": "model.backend",
    "EngineConfig.batch_invariant": "model.batch_invariant",
    "EngineConfig.block_size": "kv.prefill.block_size and kv.decode.block_size",
    "EngineConfig.device": "prefill.num_gpus and decode.num_gpus",
    "EngineConfig.draft_ref": "decode.draft_model",
    "EngineConfig.dtype": "model.dtype",
    "EngineConfig.expert_parallel": "prefill.expert_parallel and decode.expert_parallel",
    "EngineConfig.kv_blocks": "kv.prefill.memory and kv.decode.memory",
    "EngineConfig.kv_bytes": "kv.prefill.memory and kv.decode.memory",
    "EngineConfig.kv_share": "kv.prefill.memory and kv.decode.memory",
    "EngineConfig.largest_step": "prefill.chunk_tokens and decode.chunk_tokens and decode.max_num_seqs",
    "EngineConfig.max_adapter_rank": "adapters.max_rank",
    "EngineConfig.max_adapters": "adapters.max_loaded",
    "EngineConfig.max_model_len": "model.max_model_len",
    "EngineConfig.model_name": "model.served_name",
    "EngineConfig.model_ref": "model.ref",
    "EngineConfig.num_threads": "prefill.threads and decode.threads",
    "EngineConfig.prefix_caching": "kv.prefix_cache",
    "EngineConfig.quantisation": "model.quantization",
    "EngineConfig.staging_bytes": "kv.prefill.staging and kv.decode.staging",
    "EngineConfig.tensor_parallel": "prefill.tensor_parallel and decode.tensor_parallel",
    "LayerKvConfig.tpot_target_s": "decode.tpot_target_ms",
    "OrchestratorConfig.request_deadline_s": "gateway.request_deadline_s",
    "PrefillWorkerConfig.chunk_tokens": "prefill.chunk_tokens",
    "SchedulerPolicy.admission.max_queued_tokens": "scheduler.max_queued_tokens",
    "SchedulerPolicy.admission.max_wait_s": "scheduler.max_wait_s",
    "SchedulerPolicy.decision.one_pool": "workers",
    "TiersConfig.disk": "kv.disk",
    "TiersConfig.host": "kv.prefill.host_memory and kv.decode.host_memory",
    "TransferConfig.transport": "transfer.transport",
}
"""Fields of theirs that settings say, which are checked against each other. The two that are whole configs, or None
where they are off, are changed by the names of their own classes."""

T = TypeVar("T", bound="DataclassInstance")

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
_InAnyCase = BeforeValidator(lambda level: level.upper() if isinstance(level, str) else level)


class ModelSettings(Settings):
    ref: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="Built-in model name, local Hugging Face folder, GGUF file, or hub id, which `@REVISION` pins:"
        " `Qwen/Qwen3-0.6B@COMMIT`.",
    )
    served_name: Annotated[str | None, OrNothing] = Field(
        None,
        min_length=1,
        description="Name that clients use; empty: `ref` without revision, or the last part of it where it is a path.",
    )
    backend: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description="Whose code computes the model: Legato's (`native`), or that of the library transformers over"
        " Legato's KV; `auto`: Legato's where it can.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Type of weights, activations and KV; `auto`: float32 for a checkpoint in float32, else bfloat16.",
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="Round the weights of projections to 8 or 4 bits when they are loaded. On CPUs there is less to"
        " read for each token; on GPUs `int8` saves memory, but no time yet. Empty: as the checkpoint has them.",
    )
    batch_invariant: bool = Field(
        False,
        description="A sequence's logits are the same to the bit in any batch, in any chunking and after a recovery; on"
        " a CPU with AVX2 and a C++ compiler they always are (where only some nodes have AMX or AVX-512, with"
        " LEGATO_NATIVE=avx512 or avx2 on all), and `yes` refuses other machines. Slower on GPUs.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt plus output in tokens; empty: what the model was made for and the KV memory holds.",
    )
    tool_format: ToolFormatName = Field(
        "auto",
        description="How the model writes calls of functions; `auto`: as its checkpoint or chat template says, and"
        " `hermes` where they say nothing.",
    )
    reasoning_format: ReasoningFormatName = Field(
        "auto",
        description="Which marks the model puts around its reasoning; `auto`: as its checkpoint or chat template says.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="What requests that leave `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty` out are"
        " sampled with; `auto`: what the checkpoint's generation_config.json names; `none`: the API's own defaults.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="What the chat template is told where a request does not say it, such as"
        " `{enable_thinking: false}`; of the fields of requests `reasoning_effort` and `verbosity` as well. A request"
        " wins, name by name.",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Check them as those of a request, of JSON's types."""
        try:
            return template_kwargs(json.loads(json.dumps(given, allow_nan=False)), WITHOUT_DEFAULT)
        except PydanticCustomError as error:
            raise ValueError(error.message()) from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}; write texts, numbers, yes or no, lists and mappings") from error

    @property
    def name(self) -> str:
        """The name that clients write into `model`."""
        if self.served_name is not None:
            return self.served_name
        is_path = self.ref.startswith((".", "/", "~"))
        return PurePath(self.ref).name if is_path else self.ref.partition("@")[0]

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name.strip("./") == "":
            raise ValueError(
                f"ref is {self.ref!r}, whose last part is no name that clients could use; give a served_name, or write"
                " the folder's own name"
            )
        return self

    @property
    def quantisation(self) -> Quantisation | None:
        from engine.checkpoint.quantisation import (
            Quantisation,  # brings torch, for which reading a configuration need not wait
        )

        return Quantisation.of(self.quantization)


class AdapterSettings(Settings):
    folder: Annotated[str | None, OrNothing] = Field(
        None,
        min_length=1,
        description="Folder of LoRA adapters, each a folder as PEFT saves it, or a link to one; clients name it as"
        " `model` from the moment that it is there. Workers on several nodes need one that all of them see. Empty: no"
        " adapters.",
    )
    max_loaded: int = Field(
        16, ge=1, description="Adapters that a worker has in memory at once; requests for others wait for a place."
    )
    max_rank: int = Field(64, ge=1, le=512, description="Largest rank of an adapter; others are refused.")


class KvPoolSettings(Settings):
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV block.")
    memory: KvMemoryField = Field(
        KvMemory(num_bytes=2**30),
        description="KV cache of one worker: bytes, a text such as 2GiB, a number of blocks such as 4096 blocks, or a"
        " share such as 90%: what is left of that share of the device's memory, as measured at the start.",
    )
    host_memory: BudgetField = Field(
        Budget(num_bytes=2**30),
        description="Host memory of one worker's KV, on top: bytes, a size, or a share of the machine's memory such as"
        " 20%; 0: no host tier.",
    )
    staging: SizeBytes = Field(
        64 * 2**20,
        description="Device memory, on top, through which layers that rest in host memory pass while they compute:"
        " bounds what one step can fetch.",
    )

    @property
    def has_host_memory(self) -> bool:
        return self.host_memory.num_bytes != 0


class DiskSettings(Settings):
    path: str = Field(
        min_length=1, description="Folder on each node; survives restarts. Each worker takes a subfolder."
    )
    budget: BudgetField = Field(
        Budget(num_bytes=10 * 2**30), description="Most that one worker keeps there: a size, or a share of the disk."
    )
    sync: bool = Field(
        False,
        description="Wait for the disk to confirm each block; without, a crash of the machine may lose the newest.",
    )

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, budget: Budget) -> Budget:
        if budget.num_bytes == 0:
            raise ValueError("a disk tier of 0 bytes keeps nothing; leave kv.disk out instead")
        return budget


class KvSettings(Settings):
    layerkv: Annotated[Literal["auto", "off"], OrOff] = Field(
        "auto",
        description="`auto`: layers of a sequence may rest in host memory wherever a worker has some, so that requests"
        " do not queue for device KV; `off`: a sequence is computed on the device only.",
    )
    disk: DiskSettings | None = Field(None, description="Keep the KV of prompts on disk as well; empty: no disk tier.")
    prefix_cache: bool = Field(True, description="Reuse the KV of prompts that begin alike.")
    prefill: KvPoolSettings = Field(KvPoolSettings(), description="Memory of each prefill worker.")
    decode: KvPoolSettings = Field(KvPoolSettings(), description="Memory of each decode worker.")

    @property
    def pools(self) -> dict[Role, KvPoolSettings]:
        return {"prefill": self.prefill, "decode": self.decode}

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if self.disk is None:
            return self
        if not self.prefix_cache:
            raise ValueError("kv.disk keeps prompts for the prefix cache; set kv.prefix_cache: true or leave it out")
        if not (self.prefill.has_host_memory or self.decode.has_host_memory):
            raise ValueError(
                "kv.disk is filled from host memory, and no worker has any; give kv.prefill.host_memory or"
                " kv.decode.host_memory a size"
            )
        return self


class AutoscalingSettings(Settings):
    """How a pool's number of workers follows the demand."""

    min_replicas: int = Field(1, ge=0, description="Never fewer workers than this.")
    max_replicas: int = Field(ge=1, description="Never more workers than this.")
    target_utilisation: float = Field(
        0.7, gt=0, le=1, description="Share of their time that predicted demand should keep the workers busy."
    )
    start_s: float = Field(
        30.0, ge=0, description="What a new worker takes until it serves; demand is predicted so far ahead."
    )
    downscale_delay_s: float = Field(
        60.0, gt=0, description="Fewer workers must have been enough for this long before one ends."
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                "lower the first or raise the second"
            )
        if self.min_replicas == 0:
            raise ValueError(
                "min_replicas is 0, and a pool without workers hears of nothing that would let it grow again: use 1"
            )
        return self


class PoolSettings(Settings):
    """The settings that both pools of workers have."""

    num_cpus: float = Field(
        0.5,
        ge=0,
        description="CPUs that Ray sets aside for each worker, in its books: it binds nobody to a core, `threads` says"
        " what computes.",
    )
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray sets aside for each worker; 0: it computes on the CPU."
    )
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="Custom Ray resources that each worker takes, to put a pool on nodes of one kind."
    )

    @field_validator("resources")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if built_in := resources.keys() & {"CPU", "GPU", "memory", "object_store_memory"}:
            raise ValueError(
                f"{_listed(built_in)}: no custom resource, and refused by Ray; set num_cpus or num_gpus instead, or"
                " leave it out"
            )
        return resources

    threads: int = Field(
        1, ge=1, description="The most threads that compute a step of each worker on a CPU; of each of its processes."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Processes among which each worker's model is divided; its heads must divide. Pools may differ. On"
        " GPUs each process has one: `num_gpus` is as many.",
    )
    expert_parallel: bool | None = Field(
        None,
        description="How a mixture of experts is divided among the processes of `tensor_parallel`: `true`: each has"
        " whole experts; `false`: a part of every expert. Empty: parts, or whole ones where parts would not be equal,"
        " or would lose their 4 or 8 bits.",
    )
    autoscaling: AutoscalingSettings | None = Field(
        None, description="Let the number of workers follow the load; `replicas` is then the number at start."
    )


class PrefillSettings(PoolSettings):
    replicas: int = Field(1, ge=0, description="Prefill workers; 0: the decode workers do both (colocated).")
    chunk_tokens: int = Field(
        2048, ge=1, description="The most prompt tokens of one step, over all sequences: bounds its memory."
    )


class DecodeSettings(PoolSettings):
    replicas: int = Field(1, ge=1, description="Decode workers.")
    max_num_seqs: int = Field(64, ge=1, description="Sequences that one decode step may hold.")
    chunk_tokens: int = Field(
        2048,
        ge=1,
        description="The most prompt tokens that a decode worker computes itself in one step: bounds its memory. Beside"
        " running sequences it takes as many as all of them can bear by what they were promised.",
    )
    tpot_target_ms: float = Field(
        100.0,
        gt=0,
        description="Time per output token that sequences are paced by which were promised none: with LayerKV, those"
        " ahead of it wait first.",
    )
    speculation: Annotated[Literal["auto", "off"], OrOff] = Field(
        "auto",
        description="`auto`: steps also check tokens that are guessed from a request's `prediction`, from what its"
        " grammar forces, from its own text and from earlier answers to the same client, or are drawn from"
        " `draft_model`, where that pays; no token is another one where logits do not depend on the batch. `off`: one"
        " token of each sequence a step.",
    )
    draft_model: Annotated[str | None, OrNothing] = Field(
        None,
        min_length=1,
        description="Like `model.ref`: a much smaller model of the same vocabulary, loaded beside it, that guesses"
        " tokens for steps to check; a part of `kv.decode.memory` is its KV's. Or a local folder of heads that were"
        " trained for the model (`legato train-heads`). Empty: neither.",
    )


class TransferSettings(Settings):
    transport: Literal["auto", "cuda_ipc", "nccl", "shm", "tcp"] = Field(
        "auto",
        description="How KV moves; `auto`: shared memory on one node, TCP between nodes. `cuda_ipc`: within a GPU that"
        " both ends use, else like `auto`. `nccl`, experimental: from GPU to GPU by NCCL, or TCP where that cannot be"
        " set up.",
    )


class GatewaySettings(Settings):
    replicas: int = Field(1, ge=1, description="Gateway replicas.")
    num_cpus: float = Field(0.5, ge=0, description="CPUs that Ray sets aside for each gateway.")
    max_body_bytes: SizeBytes = Field(4 * 2**20, description="Largest request body; more is answered with 413.")
    request_deadline_s: float = Field(
        600.0,
        gt=0,
        le=3600.0,
        description="A request that takes longer ends with 504. HAProxy ends what lasts longer than an hour when it is"
        " configured anew.",
    )
    max_concurrent: int = Field(
        512,
        ge=1,
        description="Sequences (choices) in flight in one gateway; more are answered with 429. So is a request for"
        " several that needs more than half of the places that are free, unless nothing else is in flight. A tenant"
        " that has less than a sixteenth of them finds room beyond, up to a quarter more.",
    )
    share_prefixes: bool = Field(
        False,
        description="Reuse the KV of prompts among clients with different keys, too: a client that guesses another's"
        " prompt can then tell, by `cached_tokens` and by the time, that it was sent before.",
    )
    trust_tenant_header: bool = Field(
        False,
        description="`x-tenant` says whose a request is. Only where a proxy in front sets it and drops what clients"
        " send: whoever writes it has that tenant's share and prefixes.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Origins whose web pages may ask from a browser, such as `https://chat.example.com`; `*`: all.",
    )
    metrics_to_ray: bool = Field(
        True,
        description="Tell Ray what `/metrics` has, for who scrapes Ray's nodes; not needed where gateways are scraped.",
    )
    request_log: Annotated[str | None, OrNothing] = Field(
        None,
        min_length=1,
        description="File that each request is appended to when it ends, for `python -m cluster whatif`; empty: none.",
    )
    storage: Annotated[str | None, OrNothing] = Field(
        "~/.cache/legato/storage",
        min_length=1,
        description="Folder for what clients leave here: files, batches and responses, below the model's name; gateways"
        " on several nodes need one that all of them see. Empty: none, and such requests are refused.",
    )
    storage_budget: SizeBytes = Field(
        10 * 2**30,
        description="What files, responses and the answers of running batches may take there; more files are refused."
        " Responses take a tenth of it, and the least used go.",
    )

    @model_validator(mode="after")
    def _check_origins(self) -> Self:
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"cors_origins has {origin!r}; an origin is written https://chat.example.com, without a path, or *"
                )
        return self


class NetworkSettings(Settings):
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that workers and the scheduler listen on; `node`: each node's own, for several machines.",
    )
    require_ray_token: bool = Field(
        True,
        description="Where `host` is not loopback, refuse a Ray that does not ask for its token"
        " (`RAY_AUTH_MODE=token`): whoever reaches such a Ray can run anything on it.",
    )

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if host in ("node", "localhost"):
            return "127.0.0.1" if host == "localhost" else host
        try:
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise ValueError(
                f"{host} is no address; write an IP address, such as 127.0.0.1, or node, for each node's own"
            ) from error
        if address.is_unspecified:
            raise ValueError(
                f"{host} is every address of a machine, and others are told where to connect to; write node, for each"
                " node's own"
            )
        return host

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine, and no other node, reaches what listens on `host`."""
        return self.host != "node" and ipaddress.ip_address(self.host).is_loopback


class SchedulerSettings(Settings):
    max_queued_tokens: int = Field(
        131_072, ge=1, description="Waiting prompt tokens per worker; more requests are answered with 429."
    )
    max_wait_s: float | None = Field(
        None,
        gt=0,
        description="A request without a target for its first token waits this long for room, then 429; shorter than"
        " `gateway.request_deadline_s`, which ends it with 504. Empty: half of that, and a minute at most.",
    )
    decision_log: Annotated[str | None, OrNothing] = Field(
        None,
        min_length=1,
        description="File that every placement, wait and refusal is appended to, as a line of JSON; empty: none.",
    )
    role_flips: bool = Field(
        False,
        description="Let a worker change its role where its pool can spare it and the other one lacks workers.",
    )
    model_flips: bool = Field(
        False,
        description="Of several models: let a worker change its model where its own can spare it and another one lacks"
        " workers.",
    )


class SloClassSettings(Settings):
    ttft_ms: float | None = Field(
        None, gt=0, description="Most time from a request's arrival to the first byte of its answer; empty: no target."
    )
    tpot_ms: float | None = Field(
        None, gt=0, description="Most time per output token, as a request's mean; empty: no target."
    )
    gap_ms: float | None = Field(
        None,
        gt=0,
        description="Most time between two tokens, of all but one in a hundred of a request's gaps; empty: no target.",
    )
    share: float = Field(0.99, gt=0, lt=1, description="Share of the requests that must meet all targets.")
    service_tiers: tuple[str, ...] = Field(
        (), strict=False, description="Values of OpenAI's `service_tier` that choose this class, besides its name."
    )

    @classmethod
    def of(cls, slo_class: SloClass) -> Self:
        return cls(
            ttft_ms=None if slo_class.ttft_s is None else slo_class.ttft_s * 1e3,
            tpot_ms=None if slo_class.tpot_s is None else slo_class.tpot_s * 1e3,
            gap_ms=None if slo_class.gap_s is None else slo_class.gap_s * 1e3,
            share=slo_class.share,
            service_tiers=slo_class.service_tiers,
        )

    def named(self, name: str) -> SloClass:
        return SloClass(
            name=name,
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            gap_s=None if self.gap_ms is None else self.gap_ms / 1e3,
            share=self.share,
            service_tiers=self.service_tiers,
        )


class SloSettings(Settings):
    """Classes of service as an operator writes them, in milliseconds; `config()` gives what Legato computes with.

    slo:
      default: interactive
      classes:
        interactive: {ttft_ms: 2000, tpot_ms: 100, share: 0.99, service_tiers: [priority, scale]}
        batch: {service_tiers: [flex]}
    """

    classes: dict[str, SloClassSettings] = Field(
        {slo_class.name: SloClassSettings.of(slo_class) for slo_class in (INTERACTIVE, BATCH)},
        description="Classes of service by name.",
    )
    default: str = Field(INTERACTIVE.name, description="Class of requests that ask for none.")

    def config(self) -> SloConfig:
        """The classes with their targets in seconds. Raises ValueError if they do not fit together."""
        return SloConfig(
            classes=tuple(settings.named(name) for name, settings in self.classes.items()), default=self.default
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config()
        return self


class ServedSettings(Settings):
    """What a model has of its own: the settings of the model, and of the workers that serve it."""

    model: ModelSettings = Field(ModelSettings(), description="What is served; a text is its `ref`.")
    adapters: AdapterSettings = Field(AdapterSettings(), description="LoRA adapters beside the model.")
    kv: KvSettings = Field(KvSettings(), description="KV cache.")
    workers: int | None = Field(
        None,
        ge=1,
        description="So many workers of one type, set up as `decode` and `kv.decode` say: each computes prompts,"
        " generates tokens, or both, as the moment asks, and hands prompts over to others. In place of"
        " `prefill.replicas` and `decode.replicas`.",
    )
    prefill: PrefillSettings = Field(PrefillSettings(), description="The pool that computes prompts.")
    decode: DecodeSettings = Field(DecodeSettings(), description="The pool that generates tokens.")

    @property
    def pools(self) -> dict[Role, PrefillSettings | DecodeSettings]:
        """The settings of both pools, by the role that their workers are started in."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def least_workers(self) -> dict[Role, int]:
        """How many workers each pool has at least while nothing is wrong. Pools without workers are left out."""
        scaling = {role: pool.autoscaling for role, pool in self.pools.items()}
        least = {role: pool.replicas for role, pool in self.pools.items()}
        least |= {role: scaled.min_replicas for role, scaled in scaling.items() if scaled is not None}
        return {role: number for role, number in least.items() if number}

    @property
    def is_colocated(self) -> bool:
        """Whether there is no prefill pool, so that decode workers do both."""
        return self.prefill.replicas == 0 and self.prefill.autoscaling is None

    @field_validator("model", mode="before")
    @classmethod
    def _named_by_its_ref(cls, model: Any) -> Any:
        """Take a text for the model's `ref`:
        `serve run cluster.app:build model=NAME` can give a setting only one word."""
        return {"ref": model} if isinstance(model, str) else model

    @model_validator(mode="before")
    @classmethod
    def _of_one_type(cls, tree: Any) -> Any:
        """Turn `workers` into settings of pools: so many decode workers, and no prefill workers. Raises ValueError if
        these settings are given, too, and say something else."""
        if not isinstance(tree, Mapping) or tree.get("workers") is None:
            return tree
        workers = tree["workers"]
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            return tree  # refused by what it is itself
        if not all(isinstance(tree.get(pool, {}), Mapping) for pool in ("prefill", "decode")):
            return tree  # refused by what these are
        prefill, decode = dict(tree.get("prefill", {})), dict(tree.get("decode", {}))
        alike = {"prefill.replicas": 0, "prefill.autoscaling": None, "decode.replicas": workers}
        pools: dict[str, dict[str, Any]] = {"prefill": prefill, "decode": decode}
        given = {f"{pool}.{name}": value for pool, fields in pools.items() for name, value in fields.items()}
        if others := {name for name, value in alike.items() if given.get(name, value) != value}:
            raise ValueError(
                f"workers is {workers!r}, which stands for workers of one type and no pools, but {_listed(others)}"
                f" {'are' if len(others) > 1 else 'is'} given, too; leave out one or the other"
            )
        prefill["replicas"], decode["replicas"] = 0, workers
        return {**tree, **pools}

    @model_validator(mode="after")
    def _check_pools(self) -> Self:
        for name, pool in self.pools.items():
            scaling = pool.autoscaling
            if scaling is not None and not scaling.min_replicas <= pool.replicas <= scaling.max_replicas:
                raise ValueError(
                    f"{name}.replicas is {pool.replicas}, outside {name}.autoscaling "
                    f"({scaling.min_replicas} to {scaling.max_replicas}); it is the number at start, so keep it within"
                )
        return self

    @model_validator(mode="after")
    def _check_batch_invariance(self) -> Self:
        """Refuse batch invariance over two kinds of device, which round differently. Whether a machine has kernels for
        it only its worker can tell."""
        on_gpu = {name: bool(pool.num_gpus) for name, pool in self.pools.items() if pool.replicas}
        if self.model.batch_invariant and len(set(on_gpu.values())) > 1:
            without = next(name for name, has in on_gpu.items() if not has)
            raise ValueError(
                f"model.batch_invariant is on, but {without}.num_gpus is 0 while the other pool has GPUs, which round"
                " differently; give both pools GPUs, or neither, or leave it off"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        for name, pool in self.pools.items():
            if pool.num_gpus > pool.tensor_parallel:
                raise ValueError(
                    f"{name}.num_gpus is {pool.num_gpus:g}, but a worker with {name}.tensor_parallel:"
                    f" {pool.tensor_parallel} computes on {pool.tensor_parallel}, and the others would be idle; set"
                    f" {name}.num_gpus: {pool.tensor_parallel}, or both to {math.ceil(pool.num_gpus)}"
                )
            if pool.expert_parallel and pool.tensor_parallel == 1:
                raise ValueError(
                    f"{name}.expert_parallel is on, but {name}.tensor_parallel is 1, so that one process has all"
                    f" experts; set {name}.tensor_parallel to the number of processes, or leave expert_parallel out"
                )
            if pool.tensor_parallel > 1 and pool.num_gpus:
                _check_group_on_gpus(name, pool, self.kv.pools[name])
        return self

    @model_validator(mode="after")
    def _check_shared_gpus(self) -> Self:
        """Refuse a share of what is left of a GPU to workers beside which Ray may put another one of theirs or of the
        other pool's: whoever starts first would have all of it, and two that start at once the same."""
        on_gpu = {name: pool.num_gpus for name, pool in self.pools.items() if pool.replicas and pool.num_gpus}
        for name, num_gpus in on_gpu.items():
            memory = self.kv.pools[name].memory
            if num_gpus + min(on_gpu.values()) <= 1 and memory.share is not None:
                raise ValueError(
                    f"kv.{name}.memory is {memory}, a share of what a whole GPU has left, but {name}.num_gpus is"
                    f" {num_gpus:g}, so that other workers may be on it; set kv.{name}.memory to a size such as"
                    f" 20GiB, or {name}.num_gpus: 1"
                )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        for name, pool in self.pools.items():
            if self.adapters.folder is not None and pool.replicas and pool.tensor_parallel > 1:
                raise ValueError(
                    f"adapters.folder is set with {name}.tensor_parallel: {pool.tensor_parallel}, for which adapters"
                    " are not built; leave one of the two out"
                )
        return self


class LegatoConfig(ServedSettings):
    """The whole configuration."""

    models: tuple[ServedSettings, ...] = Field(
        (),
        strict=False,
        description="Several models in place of one: each with `model`, and what it has of its own of `adapters`, `kv`,"
        " `workers`, `prefill` and `decode`, which are not given beside it.",
    )
    transfer: TransferSettings = Field(TransferSettings(), description="Moving KV from prefill to decode.")
    gateway: GatewaySettings = Field(GatewaySettings(), description="HTTP.")
    scheduler: SchedulerSettings = Field(SchedulerSettings(), description="Placement of requests.")
    slo: SloSettings | None = Field(
        None, description="Classes of service and their targets; empty: one class, `default`, without targets."
    )
    network: NetworkSettings = Field(NetworkSettings(), description="Between Legato's own processes.")
    wait_for_nodes: bool = Field(
        False,
        description="Ray adds nodes by itself (an autoscaler): start although the nodes that are there now do not hold"
        " everything.",
    )
    log_level: Annotated[LogLevel, _InAnyCase] = Field("INFO", description="Least severe messages that are logged.")

    tuning: dict[str, dict[str, Any]] = Field(
        {},
        description="Other values for constants, in tests and experiments: fields of component configs by class, such"
        " as `DecodeWorkerConfig: {reserve_wait_s: 240}`. No promise: each may go with any version.",
    )

    def tuned(self, component: T) -> T:
        """A component's config with what `tuning` says of its class. Raises ValueError for a field that it lacks, and
        for a value that the field cannot have."""
        name = type(component).__name__
        changes = self.tuning.get(name, {})
        return _changed(f"tuning.{name}", component, changes) if changes else component

    @model_validator(mode="after")
    def _check_tuning(self) -> Self:
        if unknown := self.tuning.keys() - TUNABLE:
            raise ValueError(f"tuning names {_listed(unknown)}, but it changes {_listed(TUNABLE)}")
        for path, setting in NOT_TUNABLE.items():
            *parents, field = path.split(".")
            found: Any = self.tuning
            for name in parents:
                found = found.get(name) if isinstance(found, Mapping) else None
            if isinstance(found, Mapping) and field in found:
                raise ValueError(f"tuning.{path} is no constant but a setting; set {setting}")
        return self

    @property
    def slo_classes(self) -> SloConfig:
        return NO_TARGETS if self.slo is None else self.slo.config()

    @property
    def served(self) -> tuple[Self, ...]:
        """A configuration for each model, which reads as if that were the only one."""
        if not self.models:
            return (self,)
        own = ServedSettings.model_fields
        each_own = [{name: getattr(each, name) for name in own} for each in self.models]
        return tuple(self.model_copy(update={"models": (), **settings}) for settings in each_own)

    @property
    def names(self) -> str:
        """The names of all models, for people."""
        return ", ".join(served.model.name for served in self.served)

    def _each_served(self) -> Iterator[tuple[str, Self]]:
        """Yields each model's configuration, behind what the names of its settings begin with in errors."""
        for index, served in enumerate(self.served):
            yield (f"models.{index}." if self.models else ""), served

    def unheeded(self) -> Iterator[str]:
        """Yields sentences that name settings which are given and which nobody heeds: those of prefill workers where
        there are none."""
        for where, served in self._each_served():
            branches: dict[str, Settings] = {"prefill": served.prefill, "kv.prefill": served.kv.prefill}
            given = [
                f"{where}{branch}.{name}"
                for branch, settings in branches.items()
                for name in settings.model_fields_set - {"replicas", "autoscaling"}
                if getattr(settings, name) != type(settings).model_fields[name].default
            ]
            if served.is_colocated and given:
                why = (
                    f"{where}prefill.replicas is 0"
                    if served.workers is None
                    else f"of {where}workers there is one type"
                )
                yield f"{_listed(given)}: nobody heeds it, as {why}; decode and kv.decode say what each worker has"

    @field_validator("models", mode="before")
    @classmethod
    def _each_named_by_its_ref(cls, models: Any) -> Any:
        if not isinstance(models, (list, tuple)):
            return models
        return [{"model": model} if isinstance(model, str) else model for model in models]

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if self.models and (given := self.model_fields_set & ServedSettings.model_fields.keys()):
            raise ValueError(
                f"models is given, and so {'are' if len(given) > 1 else 'is'} {_listed(given)}; give each model its"
                " own, in models"
            )
        names: dict[str, str] = {}
        folders: dict[Path, str] = {}
        for where, served in self._each_served():
            if (other := names.setdefault(served.model.name, where)) != where:
                raise ValueError(
                    f"{where}model is named {served.model.name}, and so is {other}model; give one of them another name"
                    " in served_name"
                )
            folder = served.adapters.folder
            path = None if folder is None else Path(folder).expanduser().absolute()
            if path is not None and (other := folders.setdefault(path, where)) != where:
                raise ValueError(
                    f"{where}adapters.folder is that of {other.rstrip('.')}, too; an adapter is of one model, so give"
                    " each a folder of its own"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_secret(cls, tree: Any) -> Any:
        if isinstance(tree, Mapping) and "secret" in tree:
            raise ValueError(
                "secret is no setting: Ray's dashboard shows a file's settings to whoever may look at it. Draw another"
                " one, set the variable LEGATO_SECRET to it on every node before Ray starts there, and remove this one"
            )
        return tree

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.wait_for_nodes and self.network.is_loopback:
            raise ValueError(
                f"wait_for_nodes is on, but network.host is {self.network.host}, where no process of another node is"
                " reached; set network.host: node"
            )
        return self

    @model_validator(mode="after")
    def _check_wait(self) -> Self:
        wait_s, deadline_s = self.scheduler.max_wait_s, self.gateway.request_deadline_s
        if wait_s is not None and wait_s >= deadline_s:
            raise ValueError(
                f"scheduler.max_wait_s is {wait_s:g}, but gateway.request_deadline_s ends a request after"
                f" {deadline_s:g} s with 504, so that who waits to the end would not hear the 429 which says when to"
                f" come back; set scheduler.max_wait_s below {deadline_s:g}, or leave it out"
            )
        return self

    @property
    def max_wait_s(self) -> float:
        """Seconds that a request without a target for its first token waits for room."""
        given = self.scheduler.max_wait_s
        return min(60.0, self.gateway.request_deadline_s / 2) if given is None else given

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        transport = self.transfer.transport
        for where, served in self._each_served():
            for name, pool in served.pools.items():
                if pool.replicas and not pool.num_gpus and transport in ("cuda_ipc", "nccl"):
                    raise ValueError(
                        f"transfer.transport is {transport!r}, which does not move KV of {name} workers with"
                        f" {where}{name}.num_gpus: {pool.num_gpus:g}; leave it at 'auto'"
                    )
        return self

    @model_validator(mode="after")
    def _check_flips(self) -> Self:
        if self.scheduler.role_flips and all(served.is_colocated for served in self.served):
            raise ValueError(
                "scheduler.role_flips is on, but prefill.replicas is 0, so there is only one role; have prefill workers"
                " or leave it off"
            )
        for where, served in self._each_served():
            without = [name for name, pool in served.pools.items() if not pool.num_gpus]
            if self.scheduler.role_flips and not served.is_colocated and len(without) == 1:
                raise ValueError(
                    f"scheduler.role_flips is on, but {where}{without[0]}.num_gpus is 0 while the other pool has GPUs:"
                    " a worker keeps its devices when it changes its role, and neither could do the other's work at its"
                    " speed; give both pools GPUs, or neither, or leave it off"
                )
        return self

    @model_validator(mode="after")
    def _check_model_flips(self) -> Self:
        if not self.scheduler.model_flips:
            return self
        if len(self.models) < 2:
            raise ValueError("scheduler.model_flips is on, but there are no two models; list them in models")
        for where, served in self._each_served():
            for name, pool in served.pools.items():
                if pool.autoscaling is not None:
                    raise ValueError(
                        f"scheduler.model_flips is on, but {where}{name}.autoscaling is given, by which Serve counts"
                        " workers where they were started; leave out one of the two"
                    )
        return self

    @model_validator(mode="after")
    def _check_context(self) -> Self:
        for where, served in self._each_served():
            context = served.model.max_model_len
            if context is None:
                continue
            for name, pool in served.kv.pools.items():
                if pool.block_size > context:
                    raise ValueError(
                        f"{where}kv.{name}.block_size is {pool.block_size}, more than {where}model.max_model_len"
                        f" ({context}), so that no block could ever be full; use a smaller one, 16 for example"
                    )
        return self


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _changed(path: str, present: T, changes: Mapping[str, Any]) -> T:
    """A dataclass with these fields changed, and in those that are dataclasses only what is given. Raises ValueError
    for a field that it lacks, and for a value that a field cannot have."""
    known = get_type_hints(type(present))
    if unknown := changes.keys() - known:
        raise ValueError(
            f"{path} has {_listed(unknown)}, but the fields of {type(present).__name__} are {_listed(known)}"
        )
    typed = {}
    for name, value in changes.items():
        where, before = f"{path}.{name}", getattr(present, name)
        is_nested = is_dataclass(before) and isinstance(value, Mapping)
        typed[name] = _changed(where, before, value) if is_nested else _typed(where, known[name], value)
    try:
        return replace(present, **typed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _typed(path: str, hint: Any, value: object) -> Any:
    """A value from a YAML file as a field of this type has it, a list as a tuple for example. Raises ValueError for one
    of another type: a dataclass would take it, and a worker would fail of it later or do something else."""
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path}: {problem[0].lower()}{problem[1:]}, but it is {value!r}") from error


def _check_group_on_gpus(name: str, pool: PoolSettings, kv: KvPoolSettings) -> None:
    """Check a pool whose workers span several GPUs:
    there must be enough of them, and no KV in host memory. Raises ValueError."""
    if pool.num_gpus < pool.tensor_parallel:
        raise ValueError(
            f"{name}.tensor_parallel is {pool.tensor_parallel}, but {name}.num_gpus is {pool.num_gpus:g}, and each of"
            f" the processes has a GPU of its own; set {name}.num_gpus: {pool.tensor_parallel}"
        )
    if kv.has_host_memory:
        raise ValueError(
            f"{name}.tensor_parallel is {pool.tensor_parallel} with GPUs and kv.{name}.host_memory, but between host"
            f" memory and several GPUs no KV can be moved yet; set kv.{name}.host_memory: 0"
        )
