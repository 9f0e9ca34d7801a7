from __future__ import annotations

import pytest
import torch

from kv_transfer.transports.base import Identity, Transport
from kv_transfer.transports.cuda_ipc import DeviceCarrier
from kv_transfer.transports.process_group import DistributedCarrier, DistributedConfig, arena_on
from kv_transfer.transports.shared_memory.transport import SharedMemoryCarrier
from kv_transfer.transports.slab_pool import SlabConfig
from kv_transfer.transports.sockets import LinkConfig, SocketTransport
from kv_transfer.transports.tcp import TcpCarrier
from tests.kv_transfer.transports.transport_conformance import SMALL, MakeTransport, TransportConformance
from tests.support.device_memory import device_memory


class TestTcp(TransportConformance):
    @pytest.fixture
    def make(self) -> MakeTransport:
        def make(identity: Identity, slabs: SlabConfig = SMALL) -> Transport:
            return SocketTransport(identity, [TcpCarrier(identity, LinkConfig(slabs=slabs))])

        return make


class TestDeviceMemory(TransportConformance):
    """Of the GPU, where there is one."""

    @pytest.fixture
    def make(self) -> MakeTransport:
        def make(identity: Identity, slabs: SlabConfig = SMALL) -> Transport:
            return SocketTransport(identity, [DeviceCarrier(identity, device_memory(), LinkConfig(slabs=slabs))])

        return make


if torch.cuda.is_available():

    def test_slabs_are_in_no_memory_that_compute_may_be_at_work_in() -> None:
        """What compute has let go of is given out again before its kernels have ended, in its own stream's order."""
        device = torch.device("cuda", 0)
        of_compute = torch.empty(SMALL.arena_bytes, dtype=torch.uint8, device=device)
        address = of_compute.data_ptr()
        del of_compute
        arena = arena_on(device, SMALL)
        assert isinstance(arena, torch.Tensor) and arena.data_ptr() != address

    def test_the_next_link_s_slabs_are_where_those_of_a_closed_one_were() -> None:
        device = torch.device("cuda", 0)
        arena_on(device, SMALL)
        reserved = torch.cuda.memory_reserved(device)
        for _ in range(3):
            arena_on(device, SMALL)
        assert torch.cuda.memory_reserved(device) == reserved


if torch.cuda.device_count() > 1:

    class TestNccl(TransportConformance):
        @pytest.fixture
        def make(self) -> MakeTransport:
            def make(identity: Identity, slabs: SlabConfig = SMALL) -> Transport:
                device = torch.device("cuda", 0 if identity.worker_id.startswith("prefill") else 1)
                return SocketTransport(
                    identity, [DistributedCarrier(identity, DistributedConfig(slabs=slabs, device=device))]
                )

            return make


class TestGloo(TransportConformance):
    @pytest.fixture
    def make(self) -> MakeTransport:
        def make(identity: Identity, slabs: SlabConfig = SMALL) -> Transport:
            return SocketTransport(identity, [DistributedCarrier(identity, DistributedConfig(slabs=slabs))])

        return make


class TestSharedMemory(TransportConformance):
    @pytest.fixture
    def make(self) -> MakeTransport:
        def make(identity: Identity, slabs: SlabConfig = SMALL) -> Transport:
            return SocketTransport(identity, [SharedMemoryCarrier(identity, LinkConfig(slabs=slabs))])

        return make
