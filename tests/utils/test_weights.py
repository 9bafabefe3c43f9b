"""What tells two models apart: all that decides keys and values, wherever it is kept, and nothing else."""

import pytest
import torch
from torch import nn

from landmark.utils.errors import UserError
from landmark.utils.weights import weights_digest


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 64))


def test_one_changed_number_type_or_shape_is_another_model_and_a_weight_without_content_none():
    changed = model()
    before = weights_digest(changed)
    assert before == weights_digest(model())
    with torch.no_grad():
        changed[0].weight[257, 3] += 1
    assert weights_digest(changed) != before
    with torch.no_grad():
        changed[0].weight[257, 3] -= 1
        changed[0].weight.copy_(model()[0].weight)
    assert weights_digest(changed) == before
    changed[1].weight.data = changed[1].weight.data * 1.5
    assert weights_digest(changed) != before
    assert weights_digest(model()) != weights_digest(model().bfloat16())
    one, other = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    other.weight.data = one.weight.data.view(4, 8)
    assert weights_digest(one) != weights_digest(other)
    with pytest.raises(UserError, match=r"1.weight: the weight has no content here"):
        weights_digest(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


class Quantised(torch.Tensor):
    """A weight of integers with a scale, which computes nothing by itself."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], {}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantised(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Quantised(args[0].numbers, args[0].scale)
        raise NotImplementedError(function)


def test_quantised_weights_are_their_numbers_and_scales():
    def quantised(number=1, scale=0.5):
        layer = nn.Linear(2, 2, bias=False)
        numbers = torch.tensor([[number, 2], [3, 4]], dtype=torch.int8)
        layer.weight = nn.Parameter(Quantised(numbers, torch.tensor(scale)), requires_grad=False)
        return weights_digest(layer)

    assert quantised() == quantised()
    assert len({quantised(), quantised(number=0), quantised(scale=0.25)}) == 3
