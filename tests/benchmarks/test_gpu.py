"""The script for a GPU, without one: its checks interpreted, what it leaves in its file, and what it does not time."""

import multiprocessing
import os
import time
from functools import partial

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Item
from benchmarks.kernels import TINY
from landmark.utils.files import read_json

ITEMS = {item.name: item for item in gpu.items_of(TINY)}
CHEAP = "graph of a pretrained model", "blocks, chunks float16 d=16", "loss_of_head float32"


@pytest.mark.parametrize("name", CHEAP)
def test_kernels_pass_their_checks_interpreted(name):
    found = gpu.done(ITEMS[name], TINY)
    assert found["status"] == "ok", found
    assert found["lines"]


def test_a_token_is_timed_beside_a_plain_transformer():
    found = gpu.done(ITEMS["time: a token, tiny"], TINY)
    assert found["status"] == "ok", found
    assert {line["measured"] for line in found["lines"]} >= {gpu.OURS, gpu.PLAIN}
    assert all(line["device_ms"][0] > 0 and line["ratio"][0] > 0 for line in found["lines"])


def lines(_, ok=True, then=None):
    yield {"what": "a case", "ok": ok}
    if then is not None:
        then()


def fail():
    raise RuntimeError("out of resources\nin detail")


def test_what_fails_does_not_stop_the_others_and_a_second_call_does_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "get_context", lambda _: multiprocessing.get_context("fork"))  # imports torch once
    items = [Item("wrong", partial(lines, ok=False)), Item("broken", partial(lines, then=fail))]
    items += [Item("dead", partial(lines, then=partial(os._exit, 3))), Item("fine", lines)]
    items.append(Item("endless", partial(lines, then=partial(time.sleep, 600)), alone=True))
    words = ["--tiny", "--out", str(tmp_path / "gpu.json"), "--processes", "2", "--minutes", "0.1"]
    assert gpu.main(words, items) == 1
    found = read_json(tmp_path / "gpu.json")
    expected = {"wrong": "failed", "broken": "failed", "dead": "failed", "fine": "ok", "endless": "no time"}
    assert {name: item["status"] for name, item in found["items"].items()} == expected
    assert found["items"]["broken"]["error"] == "RuntimeError: out of resources"
    assert found["items"]["dead"]["error"] == "its process ended with 3"
    assert all(found["calls"][0][name] for name in ("command", "commit", "hardware", "versions", "time"))
    better = [Item("fine", partial(os._exit, 3)), *(Item(name, lines) for name in ("wrong", "broken"))]
    assert gpu.main(words, better) == 0  # what went well is not done again
    again = read_json(tmp_path / "gpu.json")["items"]
    assert [again[name]["call"] for name in ("fine", "wrong", "dead")] == [0, 1, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_nothing_inexact_is_timed(monkeypatch):
    exact = gpu.landmark_attention

    def slightly_off(q, k, v, layout, *, backend):
        out, lse = exact(q, k, v, layout, backend=backend)
        return out * (1.01 if backend == "triton" else 1), lse

    monkeypatch.setattr(gpu, "landmark_attention", slightly_off)
    monkeypatch.setattr(gpu, "timed", None)
    found = gpu.done(ITEMS["time: windows T=24 d=16 W=8 1:1"], TINY)
    assert [line["ok"] for line in found["lines"]] == [False]
