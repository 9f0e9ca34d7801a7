"""The process of a rank other than 0: holds its part of the model and of the KV, and computes what it is told.

Started by `engine.parallel.processes`, with which it shares a connection, by which the memory of its KV comes as well,
and its standard input: when that ends, the leader is gone, and so is this process, whatever it does at that moment.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

import torch

from engine.checkpoint.weights import load_weights
from engine.kv.cache import KVCache, KVLayout
from engine.memory.host import give_back_freed, keep_freed_memory
from engine.model.transformer import Model
from engine.parallel.group import RankGroup, RanksApartError, join_ranks
from engine.parallel.kv import shared_cache
from engine.parallel.processes import APART
from engine.parallel.protocol import (
    FREE,
    HERE,
    JOIN,
    KV,
    LOGITS,
    READY,
    STEP,
    RankSpec,
    num_on_device,
    unpack_batch,
    word_and_number,
)
from engine.parallel.rank_devices import use_device
from kernels.ops import kernels_for

logger = logging.getLogger(__name__)

_STDIN = 0


def load(leader: Connection, spec: RankSpec) -> tuple[Model, RankGroup]:
    """Load this rank's part of the model, and join the group."""
    torch.set_num_threads(spec.num_threads)
    keep_freed_memory()
    device = torch.device(spec.device)
    use_device(device)
    leader.send_bytes(HERE)
    word = leader.recv_bytes()
    assert word == JOIN, f"a leader begins with {JOIN!r}, not with {word!r}"
    ranks = join_ranks(spec)
    weights = load_weights(
        Path(spec.model_folder),
        spec.config,
        spec.quantisation,
        dtype=spec.layout.dtype,
        shard=ranks.shard,
        device=device,
    )
    kernels = kernels_for(device, batch_invariant=spec.batch_invariant, activation_bits=spec.activation_bits)
    with torch.inference_mode():
        model = Model(spec.config, weights, kernels, ranks)
    leader.send_bytes(READY)
    return model, ranks


@torch.inference_mode()
def serve(leader: Connection, model: Model, layout: KVLayout, ranks: RankGroup) -> None:
    """Compute at the leader's command, with KV of this `layout`.

    Until an exception: EOFError when the leader has ended the group, RanksApartError when a rank has failed.
    """
    kv_cache: KVCache | None = None
    while True:
        word, number = word_and_number(leader.recv_bytes())
        if word == STEP:
            assert kv_cache is not None, "a leader gives the ranks their KV before the first step"
            _compute(model, kv_cache, ranks, num_bytes=number)
        elif word == KV:
            kv_cache = None  # its memory goes first
            memory = recv_handle(leader)
            try:
                kv_cache = shared_cache(layout, number, model.device, memory)
            finally:
                os.close(memory)
        elif word == FREE:
            give_back_freed(model.device)
            ranks.meet()
        else:
            assert word == LOGITS, f"a leader says nothing like {word!r}"
            hidden = torch.empty(number, model.config.hidden_size, dtype=model.dtype, device=model.device)
            ranks.broadcast(hidden)
            model.logits(hidden)


def _compute(model: Model, kv_cache: KVCache, ranks: RankGroup, num_bytes: int) -> None:
    """A step, of which the leader tells in a message of so many bytes."""
    message = torch.empty(num_bytes, dtype=torch.uint8)
    ranks.broadcast(message)
    on_device = torch.empty(num_on_device(message), dtype=torch.int64, device=model.device)
    ranks.broadcast(on_device)
    batch = unpack_batch(message, on_device)
    model.forward(batch, kv_cache)
    if not len(batch.output_rows):
        ranks.meet()


def main() -> None:
    """`python -m engine.parallel.follower CONNECTION`: a file descriptor."""
    logging.basicConfig(level=logging.INFO)
    threading.Thread(target=_end_with_leader, name="leader-watch", daemon=True).start()
    leader = Connection(int(sys.argv[1]))
    try:
        spec = RankSpec.from_bytes(leader.recv_bytes())
        model, ranks = load(leader, spec)
        serve(leader, model, spec.layout, ranks)
    except EOFError:
        return
    except RanksApartError as error:
        logger.error("%s", error)
        sys.exit(APART)
    except Exception:  # the process's boundary: the leader notices its end
        logger.exception("a rank of a tensor-parallel group failed")
        sys.exit(1)


def _end_with_leader() -> None:
    """Reads the descriptor itself: a buffered reader that a thread waits in aborts the process that ends meanwhile."""
    while os.read(_STDIN, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
