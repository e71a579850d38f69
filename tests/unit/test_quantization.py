"""Rounded weights: how far they are from the given ones, that the kernels read them right, and
that a whole model with them is the one that torch computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.models import load, save_tiny
from kvasir.worker.kernels import reference
from kvasir.worker.kernels.library import Kernels, Unavailable, load_kernels
from kvasir.worker.kernels.packed import pack_int4, padded
from kvasir.worker.kernels.targets import TARGETS, usable_targets
from kvasir.worker.loader import ModelError
from kvasir.worker.model.linear import make_linear
from kvasir.worker.model.quantization import GROUP, Int4Weight, quantize_int4, quantize_int8
from kvasir.worker.transfer.layout import layout_mismatch

SHAPES = {
    "outputs": st.integers(1, 70),
    "inputs": st.integers(1, 130),
    "seed": st.integers(0, 2**32 - 1),
}


def random_weight(outputs: int, inputs: int, seed: int) -> Tensor:
    """Like a trained matrix: rows of differing size, and a few outliers."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random)
    outliers = torch.rand(outputs, inputs, generator=random) < 0.02
    return weight * torch.rand(outputs, 1, generator=random) * (1 + 9 * outliers)


def on_a_grid(outputs: int, inputs: int, seed: int) -> Int4Weight:
    """Codes that use the whole range of each group, as GGUF's Q4_1 has them."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-inputs // GROUP)
    codes = torch.randint(0, 16, (outputs, groups, GROUP), generator=random, dtype=torch.uint8)
    codes[..., 0], codes[..., (inputs - 1) % GROUP] = 0, 15
    scales = (torch.rand(outputs, groups, generator=random) + 0.01).half()
    minima = -(torch.rand(outputs, groups, generator=random) * 9).half()
    return Int4Weight(codes, scales, minima, inputs)


@settings(deadline=None)
@given(**SHAPES)
def test_int8_is_half_a_step_away_at_most(outputs: int, inputs: int, seed: int) -> None:
    weight = random_weight(outputs, inputs, seed)
    rounded = quantize_int8(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded.dequantized() - weight).abs() <= step * 0.5001).all()
    assert torch.equal(quantize_int8(torch.zeros(2, inputs)).dequantized(), torch.zeros(2, inputs))


@settings(deadline=None, max_examples=50)
@given(**SHAPES)
def test_int4_is_no_worse_than_plain_rounding(outputs: int, inputs: int, seed: int) -> None:
    weight = random_weight(outputs, inputs, seed)
    found = quantize_int4(weight).dequantized()
    assert found.shape == weight.shape
    for start in range(0, inputs, GROUP):
        group = weight[:, start : start + GROUP]
        low = group.amin(1, keepdim=True)
        step = (group.amax(1, keepdim=True) - low) / 15
        plain = ((group - low) / torch.where(step > 0, step, 1.0)).round() * step + low
        error = (found[:, start : start + GROUP] - group).square().sum(1)
        # The scale and the minimum are float16, which plain rounding is spared here.
        half_steps = 2.0**-9 * group.abs().amax(1, keepdim=True) + 2.0**-20
        allowed = (plain - group).abs() + half_steps
        assert (error <= allowed.square().sum(1)).all()


@settings(deadline=None, max_examples=50)
@given(outputs=st.integers(1, 40), inputs=st.integers(2, 130), seed=st.integers(0, 2**32 - 1))
def test_int4_keeps_what_is_on_such_a_grid(outputs: int, inputs: int, seed: int) -> None:
    if inputs % GROUP == 1:  # a group of one input has no range
        inputs += 1
    weight = on_a_grid(outputs, inputs, seed).dequantized()
    assert torch.equal(quantize_int4(weight).dequantized(), weight)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30, 3e6, -2e5])
def test_int4_refuses_what_its_float16_numbers_cannot_hold(value: float) -> None:
    weight = random_weight(3, 70, seed=1)
    weight[1, 40] = value
    with pytest.raises(ArithmeticError, match="not finite, or too large for float16"):
        quantize_int4(weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # without the kernels and with them
@pytest.mark.parametrize("part", ["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_matrix_that_int4_cannot_hold_is_named(tmp_path: Path, part: str, dtype: str) -> None:
    save_tiny("llama", tmp_path)
    name = f"model.layers.1.{part}.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][5, 7] = 3e6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"^model: .*{name}.* cannot be rounded to int4 \("):
        load(f"file://{tmp_path}", dtype=dtype, quantization="int4")


@pytest.fixture(scope="module", params=[target.name for target in usable_targets()])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    target = next(target for target in TARGETS if target.name == request.param)
    found = load_kernels(target)
    if isinstance(found, Unavailable):
        pytest.skip(f"NO CPU KERNELS TO TEST: {found.reason}")
    return found


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 40), bias=st.booleans(), threads=st.integers(1, 3), **SHAPES)
def test_int4_kernel_computes_what_torch_does(
    kernels: Kernels, rows: int, outputs: int, inputs: int, bias: bool, threads: int, seed: int
) -> None:
    torch.manual_seed(seed % 2**31)
    weight = quantize_int4(random_weight(outputs, inputs, seed))
    added = torch.randn(outputs).bfloat16() if bias else None
    x = torch.randn(rows, inputs).bfloat16()
    packed = pack_int4(weight.codes, weight.scales, weight.minima, inputs, added)
    engine = kernels.create(threads)
    try:
        filled = torch.nn.functional.pad(x, (0, padded(inputs) - inputs)).contiguous()
        found = kernels.logits(engine, packed, filled)
    finally:
        kernels.destroy(engine)
    # Widened to bfloat16, as both do, so that only the order of the sums differs.
    exact = reference.linear(x, weight.dequantized().bfloat16(), added)
    scale = x.float().abs() @ weight.dequantized().abs().T + 1
    assert ((found - exact).abs() <= 1e-5 * scale).all()
    by_torch = make_linear(weight, added, torch.bfloat16, int8_activations=False)(x)
    assert ((by_torch.float() - exact).abs() <= 0.01 * scale).all()


FORMS: list[dict[str, Any]] = [
    {"quantization": "int8"},
    {"quantization": "int8", "activation_quantization": "int8"},
    {"quantization": "int4"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_whole_model_in_torch_and_on_kernels(folder: Path, form: dict[str, Any]) -> None:
    """Rounding moves the logits of this random model; whoever computes, by about as much."""
    tokens = list(range(3, 60))
    exact = load(f"file://{folder}").runner.logits(tokens)
    by_torch = load(f"file://{folder}", **form).runner
    on_kernels = load(f"file://{folder}", dtype="bfloat16", **form).runner
    found, kernel = by_torch.logits(tokens), on_kernels.logits(tokens)
    moved = (found - exact).norm() / exact.norm()
    assert 1e-4 < moved < (0.3 if form["quantization"] == "int4" else 0.08)
    # The kernels have bfloat16 activations, which adds to it.
    assert (kernel - found).norm() / exact.norm() < 0.04


def test_fewer_bits_take_less_memory(folder: Path) -> None:
    sizes = [
        load(f"file://{folder}", dtype="bfloat16", **form).runner.weight_bytes
        for form in ({}, FORMS[0], FORMS[2])
    ]
    # Without quantization 12 bits: see cpp/coded.h.
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * sizes[2]


def test_kv_of_one_quantization_is_not_that_of_another(folder: Path) -> None:
    layouts = [load(f"file://{folder}", **form).layout for form in ({}, *FORMS)]
    assert [layout.quantization for layout in layouts] == ["none", "int8", "int8-a8", "int4"]
    assert len({layout.model_fingerprint for layout in layouts}) == 1
    mismatch = layout_mismatch(layouts[1], layouts[2])
    assert mismatch == "quantization is 'int8' here and 'int8-a8' at the caller"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization": "fp8"}, "quantization: fp8 is not supported: no CPU computes in it"),
        ({"activation_quantization": "int8"}, "set quantization to int8"),
        (
            {"quantization": "int4", "activation_quantization": "int8"},
            "activation_quantization: int8 activations cannot be multiplied with weights of "
            "quantization int4",
        ),
    ],
)
def test_what_is_refused(folder: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(f"file://{folder}", **fields)
    assert said in str(caught.value)
