"""Tensors in huge pages, where the system allows them, and memory given back.

A step reads all weights and much of the KV cache. In pages of 4 KiB that alone costs a page walk
for every 64 cache lines; 2 MiB pages were worth a factor of two for attention in a batch of 64.
"""

import ctypes
import mmap

import torch
from torch import Tensor

_PAGE = 2 * 1024**2


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros, its memory claimed.

    MemoryError if there is no room for it.
    """
    tensor = _mapped(shape, dtype)
    # The system hands out zeros: to claim a page, one byte of it is enough.
    tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE] = 0
    return tensor


def huge_copy(source: Tensor) -> Tensor:
    """A contiguous copy."""
    return _mapped(tuple(source.shape), source.dtype).copy_(source)


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that no memory is claimed for yet; aligned to 2 MiB if there are many."""
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if size < _PAGE:
        return torch.zeros(shape, dtype=dtype)
    try:
        # Private: shared memory has a switch of its own for huge pages, which is off by default.
        area = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be mapped ({error.strerror})") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(area)
    offset = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    return torch.frombuffer(area, dtype=dtype, count=count, offset=offset).view(shape)


def _advise(area: mmap.mmap) -> None:
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without huge pages: ordinary ones serve, more slowly.
        return


def return_free_memory() -> None:
    """Give the system back what reading the weights has left in the C library's heap.

    Only glibc keeps it, and only glibc can be asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
