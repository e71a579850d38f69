"""What the runner needs of a decoder, whoever computes it: torch on any device, the CPU kernels,
and later those of GPUs."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvasir.worker.contracts import Chunk, Sampled, SampleSpec
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.sampling.sampler import is_plainly_greedy, sample


class Decoder(Protocol):
    """Weights on one device, and the forward pass. Stateless: the KV cache is passed in."""

    @property
    def weight_bytes(self) -> int:
        """Memory of all matrices, as they are held."""
        ...

    def forward(self, chunks: Sequence[Chunk], cache: KvCache) -> Tensor:
        """Compute all tokens and write their KV.

        Args:
            chunks: as ``attention.sorted_for_attention`` orders them.

        Returns:
            A row for each token, in order, for ``logits`` and ``likeliest`` alone to read.
        """
        ...

    def first_layers(self, count: int) -> "Decoder":
        """A decoder that leaves out all layers after the first ``count``; it shares the weights."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab_size] of rows that ``forward`` returned."""
        ...

    def likeliest(self, hidden: Tensor) -> list[int]:
        """The token with the greatest logit after each row.

        FloatingPointError if the logits are not numbers; the model is broken.
        """
        ...


def draw(
    decoder: Decoder, hidden: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]
) -> list[Sampled]:
    """One token after each row; where all want the likeliest one, logits are never stored."""
    if all(map(is_plainly_greedy, specs)):
        return [Sampled(token) for token in decoder.likeliest(hidden)]
    return sample(decoder.logits(hidden), specs, eos_ids)
