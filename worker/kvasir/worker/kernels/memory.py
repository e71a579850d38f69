"""Tensors in huge pages, where the system allows them, and memory given back.

A step reads all weights and much of the KV cache. In pages of 4 KiB that alone costs a page walk
for every 64 cache lines; 2 MiB pages were worth a factor of two for attention in a batch of 64,
and a fifth of the time of reading the weights.
"""

import ctypes
import errno
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_PAGE = 2 * 1024**2
_LINE = 64
_SMAPS = Path("/proc/self/smaps")
_HEADER = re.compile(
    r"^(?P<first>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<permissions>\S+) \S+ \S+ \d+ *(?P<file>.*)$",
    re.MULTILINE,
)
_CLEAN = re.compile(r"^Anonymous: +0 kB$", re.MULTILINE)
_SWAPPED = re.compile(r"^Swap: +[1-9]", re.MULTILINE)
"""Pages of its own as well, which Anonymous does not count while they are swapped out."""

_log = logging.getLogger("kvasir.worker")


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor of zeros, its memory claimed.

    MemoryError if there is no room for it.
    """
    tensor = _mapped(shape, dtype)
    # The system hands out zeros: to claim a page, one byte of it is enough.
    tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE] = 0
    return tensor


class HugePages:
    """Room for many tensors side by side: one by one, most would be too small for huge pages.

    Memory is claimed when it is written, and given back when no tensor is left in its area.
    """

    def __init__(self, area_bytes: int = 32 * _PAGE) -> None:
        self._area_bytes = area_bytes
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, source: Tensor) -> Tensor:
        """A contiguous copy, on a cache line of its own.

        MemoryError if there is no room for it.
        """
        size = source.numel() * source.element_size()
        taken = -(-size // _LINE) * _LINE
        if taken > len(self._free):
            self._free = _mapped((max(taken, self._area_bytes),), torch.uint8)
        room, self._free = self._free[:size], self._free[taken:]
        return room.view(source.dtype).view(source.shape).copy_(source)


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
    offset = -torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # The rest, less than a huge page, would take a whole one.
        _advise(area, offset, size // _PAGE * _PAGE)
    return torch.frombuffer(area, dtype=dtype, count=count, offset=offset).view(shape)


def _advise(area: mmap.mmap, start: int, size: int) -> None:
    try:
        area.madvise(mmap.MADV_HUGEPAGE, start, size)
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


def release_library_pages() -> None:
    """Unmap the clean pages of shared libraries; what is used again comes back by itself.

    Initialization alone touches 200 MiB of torch's libraries, most of it in those for GPUs. Only
    mappings of which this process has no page of its own are let go: their bytes are the file's.
    Locked memory stays. Where the system refuses, a warning says so, and all works as before.
    """
    try:
        smaps = _SMAPS.read_text(errors="replace")
    except FileNotFoundError:  # no Linux
        return
    except OSError as error:
        _log.warning("pages of shared libraries stay in memory: %s", error)
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    refused: set[int] = set()
    for start, end in _clean_mappings(smaps):
        if advise(start, end - start, mmap.MADV_DONTNEED):
            refused.add(ctypes.get_errno())
    if reasons := ", ".join(os.strerror(code) for code in sorted(refused - {errno.EINVAL})):
        _log.warning("some pages of shared libraries stay in memory: %s", reasons)


def _clean_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """First address and end of each library's mapping that is read-only and all from its file.

    ``smaps``: as proc_pid_smaps(5) describes it.
    """
    found = list(_HEADER.finditer(smaps))
    ends = [*(match.start() for match in found[1:]), len(smaps)]
    for match, end in zip(found, ends, strict=True):
        described = smaps[match.end() : end]
        clean = _CLEAN.search(described) and not _SWAPPED.search(described)
        if clean and "w" not in match["permissions"] and ".so" in Path(match["file"]).name:
            yield int(match["first"], 16), int(match["end"], 16)
