"""Memory of the worker: tensors in huge pages, and pages of libraries given back."""

import gc
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvasir.worker.kernels import memory as memory_module
from kvasir.worker.kernels.memory import (
    HugePages,
    _clean_mappings,
    huge_zeros,
    release_library_pages,
)

HUGE_PAGE = 2 * 1024**2
MEMORY = Path("/proc/self/mem")
SMAPS = """\
1000-3000 r-xp 00000000 08:01 11                         /lib/libone.so.1
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr
3000-4000 r--p 00002000 08:01 11                         /lib/libone.so.1
Rss:                   4 kB
Anonymous:             4 kB
4000-5000 rw-p 00003000 08:01 11                         /lib/libone.so.1
Anonymous:             0 kB
5000-9000 r--p 00000000 08:01 12                         /data/model.gguf
Anonymous:             0 kB
9000-a000 r--p 00000000 00:00 0
Anonymous:             0 kB
a000-c000 r--p 00000000 08:01 13                         /lib/a b/two.cpython-311.so
Anonymous:             0 kB
Swap:                  0 kB
c000-d000 r--p 00002000 08:01 13                         /lib/a b/two.cpython-311.so
Anonymous:             0 kB
Swap:                  4 kB
"""


def test_only_clean_mappings_of_libraries_are_let_go() -> None:
    """Not those with relocated or written pages, even swapped out ones, nor any other file's."""
    assert list(_clean_mappings(SMAPS)) == [(0x1000, 0x3000), (0xA000, 0xC000)]


ALONE = """
import torch
from pathlib import Path
from kvasir.worker.kernels.memory import release_library_pages

def file_pages():
    status = Path("/proc/self/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith("RssFile:"))

torch.manual_seed(3)
rows = torch.randn(200, 200)
before, resident = rows @ rows, file_pages()
release_library_pages()
assert file_pages() < resident / 2, (file_pages(), resident)
assert torch.equal(rows @ rows, before)
"""


def test_libraries_work_after_their_pages_are_released() -> None:
    """In a process of its own: pages of other tests' models are files' as well."""
    if not Path("/proc/self/smaps").is_file():
        pytest.skip("THE SYSTEM DOES NOT TELL WHAT IS MAPPED")
    subprocess.run((sys.executable, "-c", ALONE), check=True)


def test_pages_that_the_system_keeps_are_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is mapped at these addresses, and at address 0 a process has nothing to read."""
    (tmp_path / "smaps").write_text(SMAPS)
    for smaps, said in (
        (tmp_path / "smaps", "Cannot allocate memory"),
        (MEMORY, "Input/output error"),
    ):
        monkeypatch.setattr(memory_module, "_SMAPS", smaps)
        caplog.clear()
        release_library_pages()
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "stay in memory" in record.getMessage()
        assert said in record.getMessage()


@pytest.mark.parametrize("count", [1, 1000, 2**20, 2**20 + 1, 3 * 2**20 - 1])
def test_mapped_tensors_hold_what_they_are_given(count: int) -> None:
    """Smaller than a huge page, just as large, and with a part that is none."""
    given = torch.arange(count, dtype=torch.int32).view(torch.int16)
    assert torch.equal(HugePages().copy(given), given)
    zeros = huge_zeros((2 * count,), torch.int16)
    assert zeros.shape == given.shape
    assert not zeros.any()


def test_copies_are_equal_contiguous_and_apart() -> None:
    memory = HugePages(area_bytes=3 * HUGE_PAGE)
    random = torch.Generator().manual_seed(0)
    # The last ones fit in no area that is left, one of them in none at all.
    sources = [
        torch.randn(rows, columns, generator=random).to(dtype).T
        for rows, columns, dtype in (
            (3, 5, torch.float32),
            (700, 900, torch.bfloat16),
            (1, 1, torch.int8),
            (1000, 900, torch.float32),
            (2000, 1700, torch.bfloat16),
        )
    ]
    copies = [memory.copy(source) for source in sources]
    ends = 0
    for source, copy in zip(sources, copies, strict=True):
        assert copy.is_contiguous()
        assert copy.dtype == source.dtype
        assert torch.equal(copy, source)
        assert copy.data_ptr() % 64 == 0
    spans = sorted((copy.data_ptr(), copy.data_ptr() + copy.nbytes) for copy in copies)
    for start, end in spans:
        assert start >= ends
        ends = end


def test_small_tensors_share_an_area_that_begins_at_a_huge_page() -> None:
    memory = HugePages(area_bytes=HUGE_PAGE)
    first, second = (memory.copy(torch.ones(1000)) for _ in range(2))
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 4032  # 4,000 bytes in whole cache lines


def mapped() -> int:
    """Bytes of this process's address space."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * mmap.PAGESIZE


def test_memory_goes_back_with_the_last_tensor() -> None:
    before = mapped()
    memory = HugePages(area_bytes=512 * HUGE_PAGE)
    kept = memory.copy(torch.ones(10))
    del memory
    gc.collect()
    assert kept.sum() == 10
    assert mapped() > before + 500 * HUGE_PAGE
    del kept
    gc.collect()
    assert mapped() < before + 100 * HUGE_PAGE


def test_no_room_is_an_error() -> None:
    with pytest.raises(MemoryError, match="cannot be mapped"):
        huge_zeros((1 << 60,), torch.uint8)
