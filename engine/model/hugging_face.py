"""A decoder by its own code from transformers, over Legato's paged KV: for architectures without a native model.

The model runs on one flat batch, a step's rows as one sequence with their positions. Its attention is a function that
is registered with transformers: it stores a layer's keys and values and attends through the block table by the kernels
of the device, with the same hooks before and after as a native layer. A layer, for everybody else, is one call of it.

What a model asks of attention is found out by a trial: it is built without weights, called on torch's meta device, and
each call of its attention is looked at. What cannot be served exactly is refused there, before weights are loaded.
Code that comes with a checkpoint is never run, and only safetensors are read.

Shape legend: T packed tokens, E hidden size, Q query heads, H key/value heads, D head size, R output rows,
V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.kv.cache import KVCache
from engine.model.architectures import REFUSED, SERVED
from engine.model.batch import Batch
from engine.model.config import (
    SUPPORTED_ARCHITECTURES,
    eos_token_ids,
    load_hf_config,
    read_json,
    remembered_config,
)
from engine.model.transformer import LayerHooks
from kernels.interface import Kernels, PagedAttention

_CODE = [Path(__file__), Path(__file__).with_name("architectures.py"), Path(__file__).with_name("config.py")]

_PAGED: Final = "legato"  # the implementation of attention that serves; transformers makes no masks for it
_TRIAL: Final = "legato_trial"
_TRIAL_TOKENS: Final = 5
_MOST_POSITIONS: Final = 1 << 17  # of which a mask is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceConfig:
    """What everything above the model knows of it. `head_dim` is the wider of a key's and a value's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP, or what is like it: for estimates
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...]  # tokens that each layer's attention sees, the newest included; None: all
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool

    @property
    def latent_dim(self) -> None:
        """None: the model's code is given the keys and values of all heads."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_windows)

    @property
    def longest_context(self) -> int:
        return self.max_position_embeddings

    @classmethod
    def from_folder(cls, folder: str | Path) -> HuggingFaceConfig:
        """Raises ValueError, with the reason, for what cannot be served exactly."""
        return remembered_config(cls, Path(folder), cls._read, _CODE)

    @classmethod
    def _read(cls, folder: Path) -> HuggingFaceConfig:
        hf, architecture = _known_config(folder)
        text = hf.get_text_config(decoder=True)
        calls = _tried(hf, architecture, folder)
        return cls(
            architecture=architecture,
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=_width(text),
            num_heads=max(call.num_heads for call in calls),
            num_kv_heads=calls[0].num_kv_heads,
            head_dim=max(calls[0].key_dim, calls[0].value_dim),
            layer_windows=tuple(call.window for call in calls),
            max_position_embeddings=_longest_exact(text),
            eos_token_ids=eos_token_ids(hf, folder),
            tied_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        )


def _known_config(folder: Path) -> tuple[Any, str]:
    """transformers' configuration and the name of its model. Raises ValueError for what is refused by its name."""
    raw = read_json(folder / "config.json")
    model_type = str(raw.get("model_type"))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if architecture is None:
        named = ", ".join(map(str, raw.get("architectures") or []))
        brought = " The code that comes with the folder (auto_map) is never run." if "auto_map" in raw else ""
        raise ValueError(
            f"the model in {folder} is of the type {model_type!r} ({named}), which is no language model that"
            f" transformers {transformers.__version__} knows.{brought} `python -m engine.model.architectures` lists"
            " what can be served"
        )
    if model_type not in SERVED:
        reason = REFUSED.get(model_type, "its tokens were never compared with those of transformers")
        raise ValueError(f"the model in {folder}, a {architecture}, cannot be served: {reason}")
    if raw.get("quantization_config"):
        raise ValueError(
            f"the model in {folder}, a {architecture}, comes quantised, which is only read for"
            f" {', '.join(SUPPORTED_ARCHITECTURES)}; use its checkpoint in bfloat16, float16 or float32"
        )
    return load_hf_config(folder), architecture


def _width(text: Any) -> int:
    """The width of the MLP, or of what is like it."""
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return int(max(width) if isinstance(width, list) else width)


def _longest_exact(text: Any) -> int:
    """As a native model's: longer by YaRN than its positions may say, and by long RoPE no longer than the original
    length."""
    positions = longest = int(text.max_position_embeddings)
    for parameters in _rope_parameters(text):
        original = int(parameters.get("original_max_position_embeddings") or positions)
        if parameters.get("rope_type") == "yarn":
            longest = max(longest, int((parameters.get("factor") or 1.0) * original))
        elif parameters.get("rope_type") == "longrope":
            longest = min(longest, original)
    return longest


def _rope_parameters(text: Any) -> list[dict[str, Any]]:
    """One set, or one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of attention, as the trial saw it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a model would mask, in place of the mask. `fault`: why no kernel does; a layer may never be given it."""

    window: int | None = None
    fault: str = ""


_trial: ContextVar[list[_Call]] = ContextVar("trial")
_limit: ContextVar[int] = ContextVar("limit")


class _NotServedError(Exception):
    """What a trial found, as the end of a sentence."""


def _tried(hf: Any, architecture: str, folder: Path) -> list[_Call]:
    """The calls of attention of one forward pass, in their order. Raises ValueError for what cannot be served."""
    calls: list[_Call] = []
    hf = copy.deepcopy(hf)
    for parameters in _rope_parameters(hf.get_text_config(decoder=True)):
        if parameters.get("rope_type") in ("dynamic", "longrope"):  # look at positions, which a trial does not have
            parameters["rope_type"] = "default"
    text = hf.get_text_config(decoder=True)
    longest = max(int(text.max_position_embeddings), _longest_exact(text))
    trial, limit = _trial.set(calls), _limit.set(min(_MOST_POSITIONS, longest))
    try:
        with torch.device("meta"):
            model = _model_class(architecture)._from_config(hf, attn_implementation=_TRIAL, dtype=torch.bfloat16)
        ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            _body(model.eval())(input_ids=ids, attention_mask=ids + 1, position_ids=ids, use_cache=False)
        _check_calls(calls)
    except _NotServedError as error:
        raise ValueError(f"the model in {folder}, a {architecture}, cannot be served: {error}") from None
    except Exception as error:  # whatever a model's code may raise over a config
        raise ValueError(
            f"the model in {folder}, a {architecture}, cannot be served: its code cannot be tried without weights"
            f" ({type(error).__name__}: {error})"
        ) from error
    finally:
        _trial.reset(trial)
        _limit.reset(limit)
    return calls


def _check_calls(calls: list[_Call]) -> None:
    if not calls:
        raise _NotServedError("it computes attention by itself, not by a function that can be given to it")
    shapes = {(call.num_kv_heads, call.key_dim, call.value_dim) for call in calls}
    if len(shapes) > 1:
        raise _NotServedError("its layers have key/value heads of different numbers or sizes")


def _model_class(architecture: str) -> Any:
    return getattr(transformers, architecture)


def _body(model: Any) -> Any:
    """The model without its head."""
    body = model.base_model
    if body is model or "position_ids" not in inspect.signature(body.forward).parameters:
        raise _NotServedError("its code does not take the positions of tokens")
    return body


def _try_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **asked: Any
) -> tuple[Tensor, None]:
    """Notes what is asked of attention, `query [1, Q, T, D]`."""
    if not isinstance(attention_mask, _Mask):
        raise _NotServedError("it masks attention in a way of its own")
    if attention_mask.fault:
        raise _NotServedError(attention_mask.fault)
    sinks = asked.pop("s_aux", None)
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise _NotServedError("its attention has sinks that are not one number of each head")
    asked = {name: wanted for name, wanted in asked.items() if wanted is not None}
    if unknown := [name for name, wanted in asked.items() if name not in _KNOWN and wanted is not False]:
        raise _NotServedError(f"its attention asks for {unknown[0]}, which no kernel computes")
    if asked.get("is_causal") is False or key.shape[2] != query.shape[2]:
        raise _NotServedError("it attends to more than the tokens before")
    _trial.get().append(_Call(query.shape[1], key.shape[1], key.shape[3], value.shape[3], attention_mask.window))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


# What a model may hand to its attention: windows are read off masks.
_KNOWN: Final = {"scaling", "softcap", "dropout", "is_causal", "sliding_window", "position_ids", "cache_position"}


def _try_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> _Mask:
    """Reads a mask at some positions: causal, with or without a window, is what can be computed."""
    length = _limit.get()
    keys = torch.arange(length + 1)
    window: int | None = None
    for position in (length - 1, length // 2, length // 3, 2, 0):
        try:
            seen = torch.as_tensor(mask_function(0, 0, torch.tensor(position), keys)).expand(len(keys)).nonzero()
        except (RuntimeError, IndexError):
            return _Mask(fault="its masks depend on more than positions (chunks, images)")
        first, last = (int(seen[0]), int(seen[-1])) if len(seen) else (0, -1)
        if last > position:
            return _Mask(fault="it attends in both directions")
        if position == length - 1:
            window = len(seen) if len(seen) < length else None
        if last != position or len(seen) != min(window or length, position + 1) or first != position + 1 - len(seen):
            return _Mask(fault="it attends to something else than the last tokens (chunks, strides)")
    return _Mask(window)


@dataclass(slots=True)
class _Step:
    """What attention needs in one forward pass."""

    batch: Batch
    kv_cache: KVCache
    hooks: LayerHooks | None
    attentions: tuple[PagedAttention, ...]  # by layer
    layer: int = 0  # the next one


_step: ContextVar[_Step] = ContextVar("step")


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query [1, Q, T, D]` over `key`, `value [1, H, T, D]`: `[1, T, Q, D]`, D of the values. `s_aux [Q]`:
    sinks."""
    step = _step.get()
    layer, step.layer = step.layer, step.layer + 1
    layout, hooks = step.kv_cache.layout, step.hooks
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (_heads(states, layout.head_dim, layout.dtype) for states in (query, key, value))
    if hooks is not None:
        hooks.before_store(layer)
    group = layer // layout.layers_per_group
    step.kv_cache.store(layer, step.batch.slot_mapping[group], k, v)
    if hooks is not None:
        hooks.stored(layer)
    rows = step.kv_cache.layer_rows(layer)
    sinks = None if s_aux is None else s_aux.detach().float()
    attended = step.attentions[layer].attend(q, k, v, rows, group=group, scale=scale, softcap=softcap, sinks=sinks)
    if hooks is not None:
        hooks.attended(layer)
    return attended[..., : value.shape[-1]].unsqueeze(0).to(query.dtype), None


def _heads(states: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """`[1, heads, T, D] -> [T, heads, head_dim]`: zeros beyond what a head has add nothing to a product."""
    heads = states[0].transpose(0, 1).to(dtype)
    missing = head_dim - heads.shape[-1]
    return functional.pad(heads, (0, missing)) if missing else heads.contiguous()


AttentionInterface.register(_PAGED, _paged_attention)
AttentionInterface.register(_TRIAL, _try_attention)
AttentionMaskInterface.register(_TRIAL, _try_mask)


@dataclass
class _States(MoeModelOutputWithPast):  # type: ignore[misc]
    """Final hidden states, and nothing else that a head may look for."""

    cross_attentions: None = None


class _GivenStates(nn.Module):
    """Stands where the model's body was, for the head: whatever a model does after its body, its own code does."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)

    @property
    def decoder(self) -> _GivenStates:
        """What OPT's head calls."""
        return self

    def forward(self, *_: Any, **__: Any) -> _States:
        return _States(last_hidden_state=self.states)


class HuggingFaceModel:
    """Loaded from a folder, of which `config` was read. As `engine.model.transformer.Model` for the runner."""

    def __init__(
        self, config: HuggingFaceConfig, folder: Path, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._kernels = kernels
        model = _loaded(config.architecture, folder, dtype).to(device)
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        _take_kernels(model, kernels)
        self._body = _body(model)
        self._states = _GivenStates()
        self._whole = model
        setattr(model, model.base_model_prefix, self._states)

    def forward(self, batch: Batch, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        """Final hidden states of `batch.output_rows`, `[R, E]`."""
        token = _step.set(_Step(batch, kv_cache, hooks, self._plan_attentions(batch, kv_cache)))
        try:
            states: Tensor = self._body(
                input_ids=batch.token_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False
            ).last_hidden_state
        finally:
            _step.reset(token)
        return states[0, batch.output_rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, E] -> [R, V]`, of the model's type: samplers widen what they read."""
        self._states.states = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self.device)
        logits: Tensor = self._whole(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _plan_attentions(self, batch: Batch, kv_cache: KVCache) -> tuple[PagedAttention, ...]:
        geometry = kv_cache.layout.geometry
        planned = {
            window: self._kernels.plan_attention(batch.segments, geometry, window=window, dtype=self.dtype)
            for window in set(self.config.layer_windows)
        }
        return tuple(planned[window] for window in self.config.layer_windows)


class _Projection(nn.Module):
    """A projection in place of a `torch.nn.Linear`: the device's kernel, with the weight laid out for it."""

    def __init__(self, linear: nn.Linear, kernels: Kernels) -> None:
        super().__init__()
        self._packed = kernels.pack_linear(
            linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        )
        self._width = linear.out_features
        self.weight = linear.weight.detach().to("meta")  # for who asks for its type

    def forward(self, x: Tensor) -> Tensor:
        return self._packed(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], self._width)


class _RmsNorm(nn.Module):
    """A norm in place of the model's own that computes the same: the device's kernel, in one pass over memory for
    six."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self._eps = eps
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.reshape(-1, x.shape[-1]).contiguous(), self.weight, self._eps).view(x.shape)


def _take_kernels(model: nn.Module, kernels: Kernels) -> None:
    """The device's, for what its code computes by operators of torch."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, _Projection(child, kernels))
            elif (norm := _as_rms_norm(child, kernels)) is not None:
                setattr(module, name, norm)


def _as_rms_norm(module: nn.Module, kernels: Kernels) -> _RmsNorm | None:
    """The norm as an `_RmsNorm`; None where it computes something else, as seen by what it makes of numbers."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weights = dict(module.named_parameters())
    if not (isinstance(eps, float) and "Norm" in type(module).__name__ and weights.keys() == {"weight"}):
        return None
    if weights["weight"].dim() != 1:  # one of each head
        return None
    norm = _RmsNorm(weights["weight"], eps, kernels)
    x = torch.randn(3, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([[1.0], [1e-2], [1e-3]])).to(norm.weight)  # down to where eps decides
    expected = module(x)
    close = {torch.float32: 1e-5}.get(x.dtype, 2e-2)  # who rounds before the weight, or after it, is off by a bit
    same = expected.dtype == x.dtype and torch.allclose(norm(x).float(), expected.float(), rtol=close, atol=close)
    return norm if same else None


def _loaded(architecture: str, folder: Path, dtype: torch.dtype) -> Any:
    """Raises ValueError where config and weights are not the same model's."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        model, told = _model_class(architecture).from_pretrained(
            folder,
            attn_implementation=_PAGED,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        raise ValueError(f"the checkpoint in {folder} cannot be loaded: {error}") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        names = sorted(map(str, told.get(what) or ()))
        if names:
            raise ValueError(
                f"the checkpoint in {folder} has {what.replace('_', ' ')}: {', '.join(names[:5])}; config and weights"
                " are not the same model's"
            )
    model.config.output_router_logits = False
    return model.eval()
