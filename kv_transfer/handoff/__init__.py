"""The hand-off: how the KV of one sequence gets from the worker that computed it to a decode worker.

Read in this order. The contract, with what goes wrong and what then happens, is docs/kv_transfer.md; stories of it,
step by step, are in tests/kv_transfer/handoff/scenarios/.

1. `actions`: the states of the two ends, and what the state machines tell their drivers to do.
2. `sender_state`, `receiver_state`: the two ends as pure state machines, with a table of states and events each.
   `coverage`: which tokens of which layer were announced and which have arrived; each end has one per attempt.
3. `sender`, `receiver`: the drivers, which run the machines on a worker's threads, against links and a KV cache; and
   `LayerStream`: from a worker's steps to its sender.
4. `slab_copy`: between KV blocks and slabs, with the threads that wait for a device; `gpu_slab_copy`:
   the same on a GPU.

Which thread does which leg of one slab's way ("prefill": whoever computes the prompt, which may be a decode worker):

| worker  | thread              | what                                                                         |
|---------|---------------------|------------------------------------------------------------------------------|
| prefill | compute             | computes the layer; the listener of `LayerStream` tells the main loop        |
| prefill | main loop           | `KvSender.layer_ready` ▶ `HandoffSender.on_layer_ready` ▶ `SendSlab`         |
| prefill | KV loop             | waits for a free slab of the link (`Link.acquire`)                           |
| prefill | KV loop or copy [1] | `fill_slab`: gathers and digests the tokens, once the device has stored them |
| prefill | KV loop             | sends header and slab                                                        |
| prefill | main loop           | `HandoffSender.on_slab_sent`; after the last slab and first token: `Commit`  |
| decode  | KV loop             | receives header and bytes, holds them                                        |
| decode  | main loop           | `HandoffReceiver.on_message` ▶ `Copy`                                        |
| decode  | KV loop or copy [1] | `write_slab`: writes the blocks, reads them back, digests; frees the slab    |
| decode  | main loop           | `HandoffReceiver.on_copied`; after the last one ▶ `Admit`: it decodes        |
| decode  | KV loop             | sends `Verified`                                                             |
| prefill | main loop           | `HandoffSender.on_message` ▶ `ReleaseSource`: the source blocks are free     |

[1] A copy thread where a device has to be waited for, so that no loop does.

The main loops own all state; the other threads are handed what they need and report back to the main loop.
"""
