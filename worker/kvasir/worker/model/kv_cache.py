"""The paged KV cache: one tensor, block-major, so that one block is one contiguous slab.

    [num_blocks, layers, 2 (K, V), block_size, kv_heads, head_dim]

Seen as rows, the same memory serves reads (a row is one block's K or V of one layer) and
writes (a row is one token's); neither copies or reorders the rest. The cache knows nothing
of sequences: which block belongs to whom is the scheduler's business.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvasir.worker.contracts import BlockCopy
from kvasir.worker.kernels.memory import huge_zeros
from kvasir.worker.model.config import ModelConfig


class KvCache:
    """KV of ``num_blocks`` blocks of ``block_size`` tokens, all layers."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        # Zeroed: padding is masked, but 0 * NaN of stale memory would still be NaN. It also
        # claims the memory now, so that a machine with too little fails at the start.
        self._data = (
            huge_zeros(shape, dtype)
            if device.type == "cpu"
            else torch.zeros(shape, dtype=dtype, device=device)
        )
        token_size = config.num_kv_heads * config.head_dim
        self._slab_rows = self._data.view(-1, block_size * token_size)
        self._token_rows = self._data.view(-1, token_size)
        self._heads = (config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = self._data[0].numel() * self._data.element_size()
        self.dtype = dtype
        self.device = device
        self._slabs_per_block = 2 * config.num_layers

    @property
    def data(self) -> torch.Tensor:
        """All of it, in the layout above."""
        return self._data

    def token_rows(self, blocks: np.ndarray, offsets: np.ndarray) -> torch.Tensor:
        """Rows in which layer 0 keeps K of the tokens at ``offsets`` of ``blocks``: [N]."""
        rows = blocks * (self._slabs_per_block * self.block_size) + offsets
        return torch.from_numpy(rows).to(self.device)

    def slab_rows(self, tables: np.ndarray) -> torch.Tensor:
        """Rows with layer 0's K, then V, of padded block tables [B, blocks]: [2 * B * blocks]."""
        keys = tables.reshape(-1) * self._slabs_per_block
        return torch.from_numpy(np.concatenate((keys, keys + 1))).to(self.device)

    def write(
        self, layer: int, token_rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store one layer's K and V of new tokens, each [N, kv_heads, head_dim]."""
        rows = token_rows + 2 * layer * self.block_size
        self._token_rows.index_copy_(0, rows, keys.flatten(1))
        self._token_rows.index_copy_(0, rows + self.block_size, values.flatten(1))

    def gather(
        self, layer: int, slab_rows: torch.Tensor, sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's K and V of whole block tables, each [B, kv_heads, tokens, head_dim]."""
        slabs = self._slab_rows.index_select(0, slab_rows + 2 * layer)
        both = slabs.view(2, sequences, -1, *self._heads).transpose(2, 3)
        return both[0], both[1]

    def read_blocks(self, block_ids: Sequence[int], filled_tokens: int) -> memoryview:
        """Bytes of blocks in order; what lies beyond ``filled_tokens`` is zero."""
        if not 0 <= filled_tokens <= len(block_ids) * self.block_size:
            raise ValueError(f"{len(block_ids)} blocks cannot hold {filled_tokens} tokens")
        copied = self._data.index_select(0, self._ids(block_ids))
        whole, rest = divmod(filled_tokens, self.block_size)
        if rest:
            copied[whole, :, :, rest:] = 0
            whole += 1
        copied[whole:] = 0
        flat: np.ndarray = copied.cpu().view(-1).view(torch.uint8).numpy()
        return flat.data

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks, one after the other: a source may be the target of an earlier copy."""
        for copy in copies:
            self._data[copy.target].copy_(self._data[copy.source])

    def write_blocks(self, block_ids: Sequence[int], payload: memoryview) -> None:
        """Overwrite blocks with bytes of ``read_blocks``, of the same layout."""
        if payload.nbytes != len(block_ids) * self.block_bytes:
            raise ValueError(
                f"{len(block_ids)} blocks take {len(block_ids) * self.block_bytes} bytes, "
                f"not {payload.nbytes}"
            )
        shape = (len(block_ids), *self._data.shape[1:])
        staged = torch.empty(shape, dtype=self.dtype)
        staged.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(payload, np.uint8)
        self._data.index_copy_(0, self._ids(block_ids), staged.to(self.device))

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self.device)
