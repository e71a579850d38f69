"""Random cases for the CPU kernels, each compared with its torch reference.

Run as a program, it puts one library through many cases: a library built with a sanitizer needs
a process of its own.

    python -m helpers.kernel_cases LIBRARY [COUNT]
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import pad

from kvasir.worker.kernels import reference
from kvasir.worker.kernels.library import CCache, Kernels
from kvasir.worker.kernels.packed import PackedKind, pack_bf16, pack_int8, padded


@dataclass(frozen=True)
class LinearCase:
    rows: int
    inputs: int
    outputs: int
    bias: bool
    threads: int
    seed: int


@dataclass(frozen=True)
class AttentionCase:
    start: int
    count: int
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    layers: int
    seed: int


def check_linear(kernels: Kernels, case: LinearCase) -> None:
    torch.manual_seed(case.seed)
    weight = torch.randn(case.outputs, case.inputs).bfloat16()
    bias = torch.randn(case.outputs).bfloat16() if case.bias else None
    x = torch.randn(case.rows, case.inputs).bfloat16()
    packed = pack_bf16(weight, bias)
    rows = pad(x, (0, packed.padded_inputs - case.inputs)).contiguous()
    engine = kernels.create(case.threads)
    try:
        found = kernels.logits(engine, packed, rows)
        alone = kernels.logits(engine, packed, rows[-1:].contiguous())
        likeliest = kernels.likeliest(engine, packed, rows)
    finally:
        kernels.destroy(engine)
    assert likeliest == found.argmax(-1).tolist()
    expected = reference.linear(x, weight, bias)
    torch.testing.assert_close(found, expected, atol=2e-5 * case.inputs, rtol=1e-5)
    # The rest of the batch changes nothing.
    assert torch.equal(alone[0], found[-1])


def check_coded(kernels: Kernels, case: LinearCase) -> None:
    """Coded or not, every bit of the products is the same; some weights have no code."""
    torch.manual_seed(case.seed)
    weight = torch.randn(case.outputs + 16, case.inputs + 100).bfloat16()
    odd = weight.numel() // 2000
    places = torch.randperm(weight.numel())[:odd]
    weight.view(-1)[places] = (10 ** torch.empty(odd).uniform_(-38, 38)).bfloat16()
    weight[-1, -1] = 1e-40  # not normal
    bias = torch.randn(len(weight)).bfloat16() if case.bias else None
    plain = pack_bf16(weight, bias)
    coded = kernels.coded(plain)
    assert coded.kind is PackedKind.CODED_BF16
    assert 0.75 < coded.weights.nbytes / plain.weights.nbytes < 0.85
    rows = torch.randn(case.rows, plain.padded_inputs).bfloat16()
    engine = kernels.create(case.threads)
    try:
        found = kernels.logits(engine, coded, rows)
        expected = kernels.logits(engine, plain, rows)
    finally:
        kernels.destroy(engine)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def check_int8(kernels: Kernels, case: LinearCase, int8_activations: bool) -> None:
    torch.manual_seed(case.seed)
    values = torch.randint(-127, 128, (case.outputs, case.inputs), dtype=torch.int8)
    scales = torch.rand(case.outputs) + 0.01
    bias = torch.randn(case.outputs) if case.bias else None
    x = torch.randn(case.rows, case.inputs).bfloat16()
    x[0] = 0
    packed = pack_int8(values, scales, bias, int8_activations=int8_activations)
    rows = pad(x, (0, packed.padded_inputs - case.inputs)).contiguous()
    engine = kernels.create(case.threads)
    try:
        found = kernels.logits(engine, packed, rows)
        alone = kernels.logits(engine, packed, rows[-1:].contiguous())
    finally:
        kernels.destroy(engine)
    exact = reference.rounded_rows(x) if int8_activations else x
    expected = reference.linear(exact, values.double() * scales[:, None].double(), bias)
    # Activations in two bytes are off by a 65,534th of their row's greatest.
    step = 0.0 if int8_activations else x.abs().max().item() / 65534
    atol = (1e-4 + step) * 127 * case.inputs
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    assert torch.equal(alone[0], found[-1])


def check_rms_norm(kernels: Kernels, rows: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(rows, size) * 3
    weight = torch.randn(size)
    filling = (0, padded(size) - size)
    found = kernels.rms_norm(pad(x, filling).contiguous(), pad(weight, filling), size, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found[:, :size], expected, atol=1e-5, rtol=8e-3)
    assert not found[:, size:].any()


def check_rotate(kernels: Kernels, rows: int, size: int, norm: bool, seed: int) -> None:
    torch.manual_seed(seed)
    heads = torch.randn(rows, size) * 2
    weight = torch.randn(size) if norm else None
    angles = torch.rand(rows, size // 2) * 100
    cos, sin = angles.cos(), angles.sin()
    found = kernels.rotate(heads, weight, 1e-6, cos, sin)
    expected = reference.rotate(heads, weight, 1e-6, cos, sin)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=8e-3)


def check_attention(kernels: Kernels, case: AttentionCase) -> None:
    """The sequence's blocks lie in random order in a cache full of NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    total = case.start + case.count
    blocks = -(-total // case.block_size)
    layer = case.layers - 1
    cache = torch.full(
        (blocks + 2, case.layers, 2, case.block_size, case.kv_heads, case.head_dim), float("nan")
    ).bfloat16()
    kv = torch.randn(2, total, case.kv_heads, case.head_dim, generator=generator).bfloat16()
    table = torch.randperm(blocks + 2, generator=generator)[:blocks].int()
    for position in range(total):
        block, offset = divmod(position, case.block_size)
        cache[table[block], layer, :, offset] = kv[:, position]
    shape = (case.count, case.kv_heads, case.group, case.head_dim)
    queries = torch.randn(shape, generator=generator).bfloat16()
    descriptor = CCache(
        data=cache.data_ptr(),
        layers=case.layers,
        block_size=case.block_size,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
    )
    every = range(case.kv_heads)
    found = kernels.attend(descriptor, layer, table, case.start, every, queries)
    expected = reference.attend(queries, kv[0], kv[1], case.start)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)
    # However the work is cut, every bit is the same: one head alone, one token alone.
    last = range(case.kv_heads - 1, case.kv_heads)
    one_head = kernels.attend(descriptor, layer, table, case.start, last, queries)
    assert torch.equal(one_head[:, -1], found[:, -1])
    token = queries[-1:].contiguous()
    one_token = kernels.attend(descriptor, layer, table, total - 1, every, token)
    assert torch.equal(one_token[0], found[-1])


def random_linear(random: Random) -> LinearCase:
    return LinearCase(
        rows=random.choice([1, 2, 3, 7, 12, 13, 25, 100, 130]),
        inputs=random.choice([1, 2, 15, 16, 48, 130]),
        outputs=random.choice([1, 16, 17, 48, 64, 100, 161]),
        bias=random.random() < 0.5,
        threads=random.randint(1, 4),
        seed=random.randrange(2**32),
    )


def random_attention(random: Random) -> AttentionCase:
    return AttentionCase(
        start=random.choice([0, 1, 15, 16, 100, 127, 128, 300]),
        count=random.choice([1, 1, 2, 5, 16, 33]),
        kv_heads=random.randint(1, 3),
        group=random.randint(1, 5),
        head_dim=random.choice([2, 8, 24, 32, 64, 80, 128]),
        block_size=random.choice([1, 3, 16, 32]),
        layers=random.randint(1, 3),
        seed=random.randrange(2**32),
    )


def main() -> None:
    """Many cases of everything."""
    kernels = Kernels(Path(sys.argv[1]), "under test")
    random = Random(11)
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 12):
        seed = random.randrange(2**32)
        check_linear(kernels, random_linear(random))
        check_coded(kernels, random_linear(random))
        check_int8(kernels, random_linear(random), int8_activations=False)
        check_int8(kernels, random_linear(random), int8_activations=True)
        check_attention(kernels, random_attention(random))
        check_rms_norm(kernels, random.randint(1, 5), random.randint(1, 70), seed)
        check_rotate(kernels, random.randint(1, 5), 2 * random.randint(1, 70), seed % 2 == 0, seed)
    sys.stdout.write("all cases passed\n")


if __name__ == "__main__":
    main()
