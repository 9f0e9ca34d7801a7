"""What a disk tier finds in its folder when it starts, put in order.

Only headers are read: whether a body is sound shows when it is loaded.
"""

from __future__ import annotations

import contextlib

from kv_transfer.tiers.disk.files import ColumnFormat, DamagedColumnError, aligned_buffer
from kv_transfer.tiers.disk.folder import DiskFolder, SlotFile


def restore_slots(folder: DiskFolder, form: ColumnFormat, num_slots: int) -> list[tuple[int, bytes]]:
    """(slot, hash) of the files to keep, least recently used first; all slots are below `num_slots` and differ.

    All other files are removed: damaged, of other models, second ones of a hash, and the oldest if the budget has
    become too small for all.
    """
    header = aligned_buffer(form.header_bytes)
    kept: dict[bytes, int] = {}
    for file in sorted(folder.files(), key=lambda file: (file.used_ns, file.slot), reverse=True):
        prefix_hash = _sound_hash(folder, form, file, header)
        if prefix_hash is None or prefix_hash in kept or len(kept) == num_slots:
            folder.remove(file.slot)
        else:
            kept[prefix_hash] = file.slot
    _move_below(folder, kept, num_slots)
    return [(slot, prefix_hash) for prefix_hash, slot in reversed(kept.items())]


def _sound_hash(folder: DiskFolder, form: ColumnFormat, file: SlotFile, header: memoryview) -> bytes | None:
    with contextlib.suppress(OSError, DamagedColumnError):
        folder.read(file.slot, header, form.file_bytes)
        return form.hash_of(header)
    return None


def _move_below(folder: DiskFolder, kept: dict[bytes, int], num_slots: int) -> None:
    """A smaller budget has fewer slots; files of the others move to those that are vacant."""
    taken = set(kept.values())
    vacant = (slot for slot in range(num_slots) if slot not in taken)
    for prefix_hash, slot in list(kept.items()):
        if slot >= num_slots:
            kept[prefix_hash] = next(vacant)
            folder.move(slot, kept[prefix_hash])
