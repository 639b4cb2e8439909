"""The cache's memory on a GPU: at an address that stays, although the memory behind it comes and goes.

    memory = Memory(num_bytes)      an address, and memory behind it
    memory.tensors(num, shape, dtype)
    memory.give_back(); memory.take()

CUDA graphs hold addresses: graphs made before `give_back` are valid again after `take`. The content is lost, though.
Between the two, the memory may not be touched.
"""

import math
from typing import Any

import torch

# It comes with a torch for NVIDIA GPUs, and is only there with one.
from cuda.bindings import driver  # pyright: ignore[reportMissingImports]


class Memory:
    """Raises torch.OutOfMemoryError where there is none left, also from `take`."""

    def __init__(self, num_bytes: int) -> None:
        torch.cuda.init()
        self._device = torch.cuda.current_device()
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = self._device
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        grain = _checked(driver.cuMemGetAllocationGranularity(self._kind, recommended))
        self._num_bytes = -(-num_bytes // grain) * grain
        self._address = int(_checked(driver.cuMemAddressReserve(self._num_bytes, 0, 0, 0)))
        self._is_there = False
        self.take()

    def take(self) -> None:
        if self._is_there:
            return
        error, handle = driver.cuMemCreate(self._num_bytes, self._kind, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:  # torch keeps what it once had
            torch.cuda.empty_cache()
            error, handle = driver.cuMemCreate(self._num_bytes, self._kind, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info()
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: {self._num_bytes / 2**30:.1f} GiB of cache are wanted, {free / 2**30:.1f} of "
                f"{total / 2**30:.1f} GiB are free"
            )
        _checked((error, handle))
        _checked(driver.cuMemMap(self._address, self._num_bytes, 0, handle, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._kind.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(self._address, self._num_bytes, [access], 1))
        _checked(driver.cuMemRelease(handle))  # it goes when it is no longer mapped
        self._is_there = True

    def give_back(self) -> None:
        if self._is_there:
            torch.cuda.synchronize(self._device)
            _checked(driver.cuMemUnmap(self._address, self._num_bytes))
            self._is_there = False

    def close(self) -> None:
        """Free the memory. None of its tensors may be used afterwards."""
        self.give_back()
        if self._address:
            _checked(driver.cuMemAddressFree(self._address, self._num_bytes))
            self._address = 0

    def tensors(self, num: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return `num` tensors of one shape, one after the other.

        None of them is a view: compiled code looks for what a view is a part of, and takes its type for the view's.
        """
        size = math.prod(shape) * dtype.itemsize
        assert num * size <= self._num_bytes and self._is_there
        places = (_Bytes(self._address + number * size, size) for number in range(num))
        storages = [torch.as_tensor(one, device="cuda").untyped_storage() for one in places]
        nothing: Any = torch.empty(0, dtype=dtype, device="cuda")
        return [nothing.clone().set_(one, 0, shape) for one in storages]


class BlockedKeysAndValues:
    """The cache's memory on a GPU, in blocks. An extra block, never given out, takes the writes of padding rows."""

    def __init__(
        self, num_layers: int, num_blocks: int, num_heads: int, block_tokens: int, dim: int, dtype: torch.dtype
    ) -> None:
        shape = (num_blocks + 1, num_heads, block_tokens, dim)
        self._memory = Memory(2 * num_layers * math.prod(shape) * dtype.itemsize)
        parts = self._memory.tensors(2 * num_layers, shape, dtype)
        self._keys, self._values = parts[:num_layers], parts[num_layers:]

    def attach(self, model: Any) -> None:
        """Give every attention its own part, as buffers that are never saved: a compiled layer then serves for all."""
        self._memory.take()
        for one in (*self._keys, *self._values):
            one.zero_()  # what lies beyond a context is multiplied by zero, and might be no number
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if layer is not None and hasattr(module, "q_proj"):
                module.register_buffer("paged_keys", self._keys[layer], persistent=False)
                module.register_buffer("paged_values", self._values[layer], persistent=False)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Blocks."""
        for one in (*self._keys, *self._values):
            one.index_copy_(0, targets, one.index_select(0, sources))

    def detach(self, model: Any) -> None:
        """Give the memory back. Its place stays the same, for graphs that know it."""
        for module in model.modules():
            if hasattr(module, "paged_keys"):
                del module.paged_keys, module.paged_values
        self._memory.give_back()

    def close(self) -> None:
        """Free the addresses for good, after `detach`."""
        self._memory.close()


class _Bytes:
    """A description of GPU memory, in the form that libraries exchange."""

    def __init__(self, address: int, num: int) -> None:
        self.__cuda_array_interface__ = {"shape": (num,), "typestr": "|u1", "data": (address, False), "version": 3}


def _checked(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA error: {error.name}")
    return values[0] if values else None
