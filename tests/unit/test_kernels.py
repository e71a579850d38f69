"""The CPU kernels against their torch references, over random shapes, for every target that this
machine runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.kernel_cases import (
    AttentionCase,
    LinearCase,
    check_attention,
    check_coded,
    check_int8,
    check_linear,
    check_rms_norm,
    check_rotate,
)
from kvasir.worker.kernels import build
from kvasir.worker.kernels.library import Kernels, Unavailable, load_kernels
from kvasir.worker.kernels.packed import (
    PackedKind,
    interleave_blocks,
    pack_bf16,
    pack_int8,
    padded,
)
from kvasir.worker.kernels.targets import TARGETS, runnable, usable_targets

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", params=[target.name for target in usable_targets()])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    target = next(target for target in TARGETS if target.name == request.param)
    found = load_kernels(target)
    if isinstance(found, Unavailable):
        pytest.skip(f"NO CPU KERNELS TO TEST: {found.reason}")
    return found


def cases(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    # The library is the same for all examples.
    unchanged = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=unchanged)


LINEAR = st.builds(
    LinearCase,
    rows=st.integers(1, 140),
    inputs=st.integers(1, 130),
    outputs=st.integers(1, 170),
    bias=st.booleans(),
    threads=st.integers(1, 4),
    seed=SEEDS,
)


@cases(60)
@given(case=LINEAR)
def test_linear(kernels: Kernels, case: LinearCase) -> None:
    check_linear(kernels, case)


@cases(60)
@given(case=LINEAR)
def test_coded(kernels: Kernels, case: LinearCase) -> None:
    check_coded(kernels, case)


def test_weights_of_too_many_sizes_are_not_coded(kernels: Kernels) -> None:
    sizes = 2.0 ** torch.linspace(-120, 120, 64 * 48)
    plain = pack_bf16(sizes.view(64, 48).bfloat16())
    assert kernels.coded(plain) is plain
    assert plain.kind is PackedKind.BF16


@cases(60)
@given(case=LINEAR, int8_activations=st.booleans())
def test_int8(kernels: Kernels, case: LinearCase, int8_activations: bool) -> None:
    check_int8(kernels, case, int8_activations)


@cases(60)
@given(
    start=st.integers(0, 300),
    count=st.sampled_from([1, 1, 2, 5, 33]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([2, 8, 24, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    layers=st.integers(1, 3),
    seed=SEEDS,
)
def test_attention(kernels: Kernels, **fields: Any) -> None:
    check_attention(kernels, AttentionCase(**fields))


@cases(40)
@given(rows=st.integers(1, 5), size=st.integers(1, 200), seed=SEEDS)
def test_rms_norm(kernels: Kernels, rows: int, size: int, seed: int) -> None:
    check_rms_norm(kernels, rows, size, seed)


@cases(40)
@given(rows=st.integers(1, 5), half=st.integers(1, 70), norm=st.booleans(), seed=SEEDS)
def test_rotate(kernels: Kernels, rows: int, half: int, norm: bool, seed: int) -> None:
    check_rotate(kernels, rows, 2 * half, norm, seed)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_the_likeliest_of_broken_values_is_none(kernels: Kernels, broken: float) -> None:
    weight = torch.zeros(100, 16)
    weight[99, 0] = broken
    packed = pack_bf16(weight.bfloat16())
    hidden = torch.ones(3, 16, dtype=torch.bfloat16)
    engine = kernels.create(2)
    found = kernels.likeliest(engine, packed, hidden)
    kernels.destroy(engine)
    assert found == [-1, -1, -1]


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_int8_does_not_hide_broken_rows(
    kernels: Kernels, broken: float, int8_activations: bool
) -> None:
    """Rows become integers on some targets, which hold anything but that."""
    values = torch.ones(40, 64, dtype=torch.int8)
    packed = pack_int8(values, torch.ones(40), int8_activations=int8_activations)
    hidden = torch.ones(3, 64, dtype=torch.bfloat16)
    hidden[1, 7] = broken
    engine = kernels.create(1)
    found = kernels.likeliest(engine, packed, hidden)
    logits = kernels.logits(engine, packed, hidden)
    kernels.destroy(engine)
    assert found == [0, -1, 0]
    assert not logits[1].isfinite().any()
    assert logits[::2].isfinite().all()


def test_of_equal_values_the_first_is_the_likeliest_and_padding_never(kernels: Kernels) -> None:
    packed = pack_bf16(torch.full((100, 16), -1.0).bfloat16())
    hidden = torch.ones(20, 16, dtype=torch.bfloat16)
    engine = kernels.create(3)
    found = kernels.likeliest(engine, packed, hidden)
    kernels.destroy(engine)
    assert found == [0] * 20


def test_packing_puts_pairs_of_inputs_of_16_outputs_side_by_side() -> None:
    weight = torch.arange(20 * 3, dtype=torch.float32).view(20, 3).bfloat16()
    packed = pack_bf16(weight).weights.view(torch.bfloat16).view(2, 8, 16, 2)
    filled = np.zeros((32, 16))
    filled[:20, :3] = weight.float().numpy()
    for block, pair, output, which in np.ndindex(2, 8, 16, 2):
        value = packed[block, pair, output, which].item()
        assert value == filled[16 * block + output, 2 * pair + which]


def test_gate_and_up_alternate_by_blocks() -> None:
    gate, up = torch.ones(20, 2), torch.full((20, 2), 2.0)
    mixed = interleave_blocks(gate, up)
    assert mixed.shape == (64, 2)
    assert (
        mixed[:, 0].tolist()
        == [1.0] * 16 + [2.0] * 16 + [1.0] * 4 + [0.0] * 12 + [2.0] * 4 + [0.0] * 12
    )
    assert padded(20) == 32


def test_the_best_target_is_chosen_by_what_the_cpu_has() -> None:
    everything = {name: True for target in TARGETS for name in target.needs}
    assert [t.name for t in runnable(everything)] == ["avx512bf16", "avx512", "avx2"]
    assert [t.name for t in runnable(everything | {"avx512_bf16": False})] == ["avx512", "avx2"]
    assert [t.name for t in runnable(everything | {"avx512_f": False})] == ["avx2"]
    assert runnable({"num_logical_cores": 2}) == ()


# --- where libraries come from ---------------------------------------------------------------


@pytest.fixture
def nothing_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "packaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvasir" / "kernels"


def test_without_a_compiler_there_are_none_and_a_reason(
    nothing_packaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(nothing_packaged))
    monkeypatch.delenv("CXX", raising=False)
    found = load_kernels(TARGETS[-1])
    assert isinstance(found, Unavailable)
    assert "no C++ compiler" in found.reason


def test_a_failing_compiler_leaves_nothing_behind(
    nothing_packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "a.cpp:1: error: bad" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = load_kernels(TARGETS[-1])
    assert isinstance(found, Unavailable)
    assert "broken-c++ failed: a.cpp:1: error: bad" in found.reason
    assert not list(nothing_packaged.iterdir())


def test_first_use_builds_into_the_cache_once(
    nothing_packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        real = build.find_compiler()
    except build.BuildError as error:
        pytest.skip(f"NO CPU KERNELS TO TEST: {error}")
    targets = usable_targets()
    if not targets:
        pytest.skip("NO CPU KERNELS TO TEST: this CPU runs none of the targets")
    count = tmp_path / "count"
    compiler = tmp_path / "counting-c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo >> "{count}"\nexec "{real}" "$@" -O1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        found = load_kernels(targets[-1])
        assert isinstance(found, Kernels)
    assert count.read_text() == "\n"
    assert len(list(nothing_packaged.iterdir())) == 1


def test_an_unwritable_cache_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "packaged")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "true")
    found = load_kernels(TARGETS[-1])
    assert isinstance(found, Unavailable)
    assert "cannot be written" in found.reason
