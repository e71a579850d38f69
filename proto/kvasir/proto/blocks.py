"""Hashes of KV blocks: the one thing that a router and a worker must compute alike.

A prompt is cut into blocks of ``block_size`` tokens. Each full block's hash covers its
tokens and, through the parent's hash, everything before it, so equal hashes mean equal
prefixes. SHA-256 keeps a client from building a prompt that collides with another one;
the salt keeps tenants from sharing, or timing, each other's prefixes.
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise

HASH_BYTES = 32

_DOMAIN = b"kvasir.block.v1"


def root_hash(block_size: int, salt: bytes = b"") -> bytes:
    """Parent of every first block.

    The block size is part of it: two sides that cut prompts differently share nothing
    rather than mistake one block for another.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    return hashlib.sha256(_DOMAIN + block_size.to_bytes(4, "little") + salt).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block, given the hash of the block before it."""
    return hashlib.sha256(parent + _encode(token_ids)).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    """The hash chain of all full blocks of a prompt; the unfilled tail has none.

    Args:
        token_ids: token ids, each in [0, 2**32).
        block_size: tokens in a block.
        salt: the tenant's ``cache_salt``, empty for none.

    Returns:
        ``len(token_ids) // block_size`` hashes of ``HASH_BYTES`` bytes.
    """
    parent = root_hash(block_size, salt)
    data = memoryview(_encode(token_ids))
    stride = 4 * block_size
    chain = []
    for start, end in pairwise(range(0, len(data) + 1, stride)):
        parent = hashlib.sha256(parent + data[start:end]).digest()
        chain.append(parent)
    return chain


def cacheable_blocks(num_tokens: int, block_size: int) -> int:
    """How many leading blocks of a prompt may come from a cache.

    The last token is always computed, because its logits give the first output token.
    """
    return max(num_tokens - 1, 0) // block_size


def _encode(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0
