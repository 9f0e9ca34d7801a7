"""How a checkpoint turns hidden states into one vector: what sentence-transformers wrote beside its weights, if that.

A gateway reads it, and says with each request how it is pooled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.sequence import Pooling

_METHODS: Final[dict[str, Pooling]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize")  # vectors are normalised in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPooling:
    """`size`: of the vectors. `refusal`: why nothing can be pooled as the checkpoint asks for, a clause; "": it can."""

    method: Pooling = "last"
    size: int
    refusal: str = ""

    @classmethod
    def from_folder(cls, folder: str | Path) -> CheckpointPooling:
        """Read how a checkpoint pools, from `modules.json` and the pooling's `config.json`; without them the last
        token. Raises ValueError for files that hold something else."""
        folder = Path(folder)
        size = _vector_size(folder / "config.json")
        modules = folder / "modules.json"
        found = _read(modules) if modules.exists() else [{"type": "Pooling", "path": "1_Pooling"}]
        try:
            named = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in found]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{modules} is no list of modules, each of a type and a path; fetch it again") from error
        if others := [kind for kind, _ in named if kind not in _KNOWN_MODULES]:
            return cls(size=size, refusal=f"its checkpoint has a module {others[0]!r}, which is not computed here")
        where = next((path for kind, path in named if kind == "Pooling"), "")
        config = folder / where / "config.json"
        if not where or not config.exists():
            return cls(size=size)
        modes = _modes(_read(config))
        if len(modes) == 1 and modes[0] in _METHODS:
            return cls(method=_METHODS[modes[0]], size=size)
        shown = " and ".join(modes) or "nothing"
        return cls(
            size=size, refusal=f"its checkpoint pools {shown}; only 'lasttoken' and 'mean_tokens' are computed here"
        )


def _vector_size(path: Path) -> int:
    """The width of final hidden states: the hidden size, as most or GPT-2 call it, or that of the embeddings, to which
    OPT projects its last states back."""
    config = _read(path)
    named = config if isinstance(config, dict) else {}
    size = named.get("word_embed_proj_dim") or named.get("hidden_size", named.get("n_embd"))
    if not isinstance(size, int):
        raise ValueError(f"{path} does not say the hidden_size of its model; fetch it again")
    return size


def _modes(config: dict[str, Any]) -> list[str]:
    """The modes of a pooling's config: one flag for each, or newer ones by name."""
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    prefix = "pooling_mode_"
    return [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch it again") from error
