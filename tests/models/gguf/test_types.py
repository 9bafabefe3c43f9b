"""Each type's integers, scales and minima, and products with them, against the `gguf` package's own weights."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("gguf", reason="the optional extra `gguf` is not installed")


import gguf

from landmark.models.gguf import linear
from landmark.models.gguf.file import Mapped, Stored
from landmark.models.gguf.linear import QuantizedEmbedding, QuantizedLinear, expanded, tile_rows
from landmark.models.gguf.types import KINDS, integers
from landmark.utils.errors import UserError
from tests.models.gguf.writing import random_blocks

ROWS, COLUMNS = 200, 768  # rows are no multiple of a tile's
packs = pytest.mark.skipif(tile_rows() is None, reason="this processor has no product of packed integers")


@pytest.fixture(params=KINDS)
def matrix(request, tmp_path):
    """A tensor of a file, and its weights as the package `gguf` computes them."""
    blocks = random_blocks(request.param, ROWS, COLUMNS, seed=1)
    (tmp_path / "blocks").write_bytes(b"begins" + blocks.tobytes())
    stored = Stored(Mapped(str(tmp_path / "blocks")), "one", request.param, (ROWS, COLUMNS), 6)
    return stored, torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[request.param]))


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def test_weights_are_those_of_the_package_gguf(matrix):
    stored, weights = matrix
    assert torch.equal(expanded(stored, torch.float32), weights)
    whole, scales, minima = integers(stored.kind, stored.rows())
    assert whole.dtype == torch.int8
    assert scales.shape == (ROWS, COLUMNS // KINDS[stored.kind].group)
    assert (minima is not None) == bool(KINDS[stored.kind].centre)


@packs
@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_a_product_is_as_exact_as_that_of_the_weights_in_bfloat16(matrix, rows, monkeypatch):
    """Few rows are multiplied with packed integers, many with expanded weights, in parts here."""
    stored, weights = matrix
    monkeypatch.setattr(linear, "BUFFER", 70 * COLUMNS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    bias = torch.nn.Parameter(torch.randn(ROWS).bfloat16(), requires_grad=False)
    x = torch.randn(2, rows, COLUMNS).bfloat16()
    with torch.inference_mode():
        found = QuantizedLinear(stored, bias, order, is_tied=False)(x)
    exact = F.linear(x.double(), weights[order].double(), bias.double())
    plain = F.linear(x, weights[order].bfloat16()) + bias
    assert found.shape == exact.shape
    assert not rows or error(found, exact) < 2 * error(plain, exact) < 0.02


@packs
def test_expanded_weights_are_the_integers_times_rounded_scales(matrix):
    stored, _ = matrix
    packed = linear.packed(stored)
    whole, scales, minima = integers(stored.kind, stored.rows())
    whole, centre = whole.float().view(*scales.shape, -1), KINDS[stored.kind].centre
    zero = torch.zeros_like(scales) if minima is None else minima + centre * scales
    expected = (whole - centre) * scales.bfloat16().float()[..., None] + zero.bfloat16().float()[..., None]
    found = packed.expanded(0, len(packed.columns)).T[:ROWS]
    assert torch.equal(found, expected.flatten(1).bfloat16())


def test_other_types_of_numbers_and_gradients_take_the_weights(matrix):
    stored, weights = matrix
    layer, x = QuantizedLinear(stored, None, None, is_tied=False), torch.randn(5, COLUMNS)
    assert torch.equal(layer(x), F.linear(x, weights))
    x = x.bfloat16().requires_grad_()
    layer(x).sum().backward()
    elsewhere = x.detach().to("meta")  # as on a GPU
    assert layer(elsewhere).shape == (5, ROWS)
    assert QuantizedEmbedding(stored, torch.bfloat16, None).to("meta")(elsewhere[0].long()).shape == (COLUMNS, COLUMNS)
    torch.testing.assert_close(x.grad, weights.bfloat16().sum(0, keepdim=True).expand(5, -1), rtol=0.02, atol=0.02)


def test_an_embedding_reads_its_rows_and_copies_are_the_same(matrix):
    stored, weights = matrix
    layer, ids = QuantizedEmbedding(stored, torch.bfloat16, torch.tensor(3.0)), torch.tensor([[7, 199], [0, 7]])
    expected = weights[ids].bfloat16() * 3
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(each(ids), expected)
        assert each.weight_digest() == layer.weight_digest()
    assert layer.to(torch.float32)(ids).dtype == torch.float32


@packs
def test_scales_that_are_not_finite_are_refused(tmp_path):
    blocks = random_blocks("Q4_K", 64, 256, seed=1)
    blocks[3, :2] = 0xFF
    (tmp_path / "blocks").write_bytes(blocks.tobytes())
    with pytest.raises(UserError, match="tensor one has scales that are not finite"):
        linear.packed(Stored(Mapped(str(tmp_path / "blocks")), "one", "Q4_K", (64, 256), 0))
