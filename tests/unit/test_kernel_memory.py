"""Memory of the worker: mapped tensors, and pages of libraries given back."""

from pathlib import Path

import pytest
import torch

from kvasir.worker.kernels.memory import (
    _clean_mappings,
    huge_copy,
    huge_zeros,
    release_library_pages,
)

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
"""


def test_only_clean_mappings_of_libraries_are_let_go() -> None:
    """Not those with relocated or written pages, not a model's file, not anonymous memory."""
    assert list(_clean_mappings(SMAPS)) == [(0x1000, 0x3000), (0xA000, 0xC000)]


def test_libraries_work_after_their_pages_are_released() -> None:
    if not Path("/proc/self/smaps").is_file():
        pytest.skip("THE SYSTEM DOES NOT TELL WHAT IS MAPPED")
    torch.manual_seed(3)
    rows = torch.randn(200, 200)
    before, resident = rows @ rows, file_pages()
    release_library_pages()
    assert file_pages() < resident / 2
    assert torch.equal(rows @ rows, before)


def file_pages() -> int:
    """kB of this process that are pages of files."""
    status = Path("/proc/self/status").read_text()
    return next(int(row.split()[1]) for row in status.splitlines() if row.startswith("RssFile:"))


@pytest.mark.parametrize("count", [1, 1000, 2**20, 2**20 + 1, 3 * 2**20 - 1])
def test_mapped_tensors_hold_what_they_are_given(count: int) -> None:
    """Smaller than a huge page, just as large, and with a part that is none."""
    given = torch.arange(count, dtype=torch.int32).view(torch.int16)
    assert torch.equal(huge_copy(given), given)
    zeros = huge_zeros((2 * count,), torch.int16)
    assert zeros.shape == given.shape
    assert not zeros.any()
