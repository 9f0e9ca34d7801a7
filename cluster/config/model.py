"""The `model` part of the configuration: what is served, and in which numbers."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from cluster.config.fields import Settings

if TYPE_CHECKING:
    from engine.checkpoint.quantisation import Quantisation


class ModelSettings(Settings):
    ref: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="Built-in model name, local Hugging Face folder, GGUF file, or hub id, which `@REVISION` pins:"
        " `Qwen/Qwen3-0.6B@COMMIT`.",
    )
    served_name: str | None = Field(
        None,
        min_length=1,
        description="Name that clients use; empty: `ref` without revision, or the last part of it where it is a path.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights, activations and KV; `auto`: the checkpoint's own."
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="Round the weights of projections to 8 or 4 bits when they are loaded: less to read for each token;"
        " empty: as the checkpoint has them.",
    )
    batch_invariant: bool = Field(
        False,
        description="A sequence's logits are the same to the bit in any batch, in any chunking and after a recovery; on"
        " a CPU with AVX-512 and bfloat16 they always are, and `yes` refuses other machines. Slower on GPUs.",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt plus output in tokens; empty: what the model was made for and the KV memory holds.",
    )

    @property
    def name(self) -> str:
        """What clients write into `model`."""
        if self.served_name is not None:
            return self.served_name
        is_path = self.ref.startswith((".", "/", "~"))
        return PurePath(self.ref).name if is_path else self.ref.partition("@")[0]

    @property
    def quantisation(self) -> Quantisation | None:
        from engine.checkpoint.quantisation import (
            Quantisation,  # brings torch, for which reading a configuration need not wait
        )

        return Quantisation.of(self.quantization, None)
