from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from landmark.experiment.config.schema import TrainConfig
from landmark.experiment.training import optimization
from landmark.experiment.training.optimization import (
    learning_rate,
    make_optimizer,
    orthogonal,
    parameter_groups,
    set_learning_rate,
)
from tests.experiment.training.training_case import EXTRAS, KINDS, make_config, make_model


def settings(steps: int) -> TrainConfig:
    return TrainConfig(steps=steps, batch_size=1, length=1)


@pytest.mark.parametrize("steps", [1, 2, 40, 51, 300])
def test_learning_rate_is_that_of_one_cycle(steps):
    train = settings(steps)
    if steps < 3:  # which OneCycleLR does not know
        assert all(0 < learning_rate(step, train) <= 2e-3 for step in range(steps))
        return
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=train.max_lr,
        total_steps=steps,
        pct_start=train.warmup,
        cycle_momentum=False,
        div_factor=train.max_lr / train.start_lr,
        final_div_factor=train.start_lr / train.final_lr,
    )
    for step in range(steps):
        assert learning_rate(step, train) == pytest.approx(cycle.get_last_lr()[0], rel=1e-9), step
        if step < steps - 1:
            optimizer.step()
            cycle.step()


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_in_one_group_and_matrices_alone_decay(kind):
    model = make_model(make_config(kind))
    decayed, kept = parameter_groups(model, 1e-3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (1e-3, 0.0)
    if kind == "transformer":
        for group in make_optimizer(model, settings(100)).param_groups:
            assert (group["lr"], group["betas"]) == (pytest.approx(2e-5), (0.9, 0.95))
    grouped = [id(weight) for group in (decayed, kept) for weight in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert all(weight.ndim == 2 and "blocks." in names[id(weight)] for weight in decayed["params"])
    assert {names[id(weight)] for weight in kept["params"]} == {
        name
        for name in names.values()
        if any(part in name for part in ("norm", "bias", "convolution", "embedding")) or name == "cmt.weight"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_takes_the_matrices_and_adamw_the_rest(dtype, monkeypatch):
    """The step of each is that of its own optimizer, at its own learning rate; PyTorch's Muon is in bfloat16."""
    monkeypatch.setattr(optimization, "orthogonal", partial(orthogonal, dtype=dtype))
    train = replace(settings(100), muon_lr=1e-2)
    ours, alone = (make_model(make_config(EXTRAS)) for _ in range(2))
    alone.load_state_dict(start := deepcopy(ours.state_dict()))
    optimizer = make_optimizer(ours, train)
    decayed, rest = parameter_groups(alone, train.weight_decay)
    muon = torch.optim.Muon([decayed], momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([rest], betas=(0.9, 0.95), fused=True)
    for step in range(3):
        for weight, same in zip(ours.parameters(), alone.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            same.grad = weight.grad.clone()
        set_learning_rate(optimizer.param_groups, step, train)
        optimizer.step()
        muon.param_groups[0]["lr"] = learning_rate(step, train) * 5
        adamw.param_groups[0]["lr"] = learning_rate(step, train)
        muon.step()
        adamw.step()
    matrices = {id(weight) for weight in decayed["params"]}
    for (name, same), weight in zip(alone.named_parameters(), ours.parameters(), strict=True):
        if id(same) in matrices and dtype == torch.float32:
            assert (weight - same).norm() < 0.02 * (same - start[name]).norm()
        else:
            assert torch.equal(weight, same)


def test_muon_of_matrices_together_is_that_of_each(monkeypatch):
    """As on a GPU, where a step for each matrix would take longer to launch than to compute."""
    train, models = replace(settings(100), muon_lr=2e-3), [make_model(make_config(EXTRAS)) for _ in range(2)]
    for model, devices in zip(models, ((), ("cpu",)), strict=True):
        monkeypatch.setattr(optimization, "TOGETHER", devices)
        optimizer = make_optimizer(model, train)
        torch.manual_seed(0)
        for _ in range(2):
            for weight in model.parameters():
                weight.grad = torch.randn_like(weight)
            optimizer.step()
    for alone, together in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(together, alone)
    matrices = parameter_groups(models[0], 0.0)[0]["params"]
    assert len(optimization._together(matrices)) == 4 < len(matrices)
