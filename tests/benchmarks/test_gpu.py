"""The benchmark of a GPU, rehearsed: interpreted, with a clock that is set, without packages, and killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, kernels, table
from benchmarks.gpu.items import TINY, items_of
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.work import Budget, Item, run
from landmark.attention import landmark_attention

ROOT = Path(__file__).parents[2]
ABSENT = "hydra", "omegaconf", "wandb", "datasets", "tiktoken", "transformers"  # where GPUs are rented


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ends(path: Path) -> list[tuple[str, str]]:
    """The items' names and statuses, in order."""
    return [(line["item"], line["status"]) for line in lines_of(path) if line["kind"] == "item"]


def without_packages(folder: Path) -> dict[str, str]:
    """An environment in which Python finds none of the absent packages."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def started(out: Path, environment: dict[str, str], only: str, *more: str) -> subprocess.Popen[str]:
    words = ["--rehearse", "--processes", "1", "--out", str(out), "--only", only, *more]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_without_hydra_and_killed_it_goes_on_where_it_was(tmp_path):
    """The first item ends, the second is killed at its first line, a second call does it and the third."""
    out, environment = tmp_path / "gpu.jsonl", without_packages(tmp_path)
    only = "tiles: forward float16,rotation,time: retrieved"
    killed = started(out, environment, only)
    for line in killed.stdout:
        if '"item": "rotation"' in line:
            killed.send_signal(signal.SIGTERM)
            break
    _, error = killed.communicate(timeout=60)
    assert killed.returncode == 128 + signal.SIGTERM, error
    first = lines_of(out)
    assert [first[0]["kind"], first[-1]["kind"], first[-1]["status"]] == ["call", "end", "interrupted"]
    assert dict(ends(out))["tiles: forward float16 d=16 W=8"] == "ok"
    assert {"rotation", "time: retrieved blocks"}.isdisjoint(dict(ends(out)))

    again = started(out, environment, only, "--resume")
    printed, error = again.communicate(timeout=120)
    assert again.returncode == 0, error + printed
    second = lines_of(out)[len(first) :]
    assert "\n".join(map(json.dumps, second)) == "\n".join(json.dumps(json.loads(x)) for x in printed.splitlines())
    assert {line["item"] for line in second if "item" in line} == {"rotation", "time: retrieved blocks"}
    timed = [line for line in second if line["kind"] == "time"]
    assert timed
    assert all(0 < line["device_ms"][0] < 1e6 for line in timed)
    for word in ("commit", "hardware", "versions", "command"):
        assert second[0][word]

    assert gpu.main(["--rehearse", "--out", str(out)]) == 1  # not on the lines of another call
    assert table.main([str(out)]) == 0
    text = re.sub(r" +", " ", out.with_suffix(".md").read_text())  # of columns as wide as their widest cell
    assert all(f"| {line['setting']} | {line['measured']} |" in text for line in timed)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "item",
    [i for i in items_of(TINY) if i.name.split(":")[0] in ("top-k", "layouts", "softmaxes", "attention in parts")],
)
def test_the_kernels_pass_their_checks_interpreted(item):
    found = list(item.run(TINY))
    assert found
    assert all(line["ok"] for line in found), found


def lines(scale, ok=True, then=None):
    yield {"kind": "check", "ok": ok}
    if then is not None:
        then()


def fail():
    raise RuntimeError("out of resources\nin detail")


def hang(mark):
    mark.touch()
    time.sleep(600)


ITEMS = [Item("wrong", partial(lines, ok=False), 1), Item("broken", partial(lines, then=fail), 1)]
ITEMS += [Item("dead", partial(lines, then=partial(os._exit, 3)), 1), Item("fine", lines, 1)]


@pytest.mark.parametrize("processes", [1, 3])
def test_what_fails_is_a_line_and_the_others_go_on(tmp_path, processes):
    journal = Journal(tmp_path / "gpu.jsonl", resume=False)
    assert not run(ITEMS, None, journal, Budget(60, lambda: 0.0), processes)
    assert dict(ends(tmp_path / "gpu.jsonl")) == dict.fromkeys(("wrong", "broken", "dead"), "failed") | {"fine": "ok"}
    errors = {line["item"]: line["error"] for line in lines_of(tmp_path / "gpu.jsonl") if "error" in line}
    expected = {"wrong": "1 wrong", "broken": "RuntimeError: out of resources", "dead": "its process ended with 3"}
    assert errors == expected


def test_what_the_time_does_not_suffice_for_is_left_out_and_what_hangs_is_ended(tmp_path):
    """Of ten seconds, at a clock that stands still until the one that hangs has begun; then an hour is over."""
    mark = tmp_path / "begun"
    endless = Item("endless", partial(lines, then=partial(hang, mark)), 1)
    items = [Item("fine", lines, 9), Item("long", lines, 11), endless, Item("late", lines, 1)]
    journal = Journal(tmp_path / "gpu.jsonl", resume=False)
    assert not run(items, None, journal, Budget(10, lambda: 3600.0 * mark.exists()), 1)
    found = [("fine", "ok"), ("long", "left out"), ("endless", "failed"), ("late", "left out")]
    assert sorted(ends(tmp_path / "gpu.jsonl")) == sorted(found)
    journal.close()
    path = tmp_path / "gpu.jsonl"
    path.write_text(path.read_text() + '{"kind": "item", "item": "b", "sta')  # a line that was cut off is read over
    journal = Journal(path, resume=True)
    journal.write({"kind": "item", "item": "c", "status": "ok"})
    assert journal.done == {"fine"}
    assert Journal(path, resume=True).done == {"fine", "c"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def slightly_off(q, k, v, layout, *, backend, **settings):
    out, lse = landmark_attention(q, k, v, layout, backend=backend, **settings)
    return out * (1.01 if backend == "triton" else 1), lse


def test_nothing_inexact_is_timed():
    with mock.patch("benchmarks.gpu.shapes.landmark_attention", slightly_off):
        (line,) = kernels.beside_flash(24, 16, 8, 1, TINY)
    assert not line["ok"]
    with mock.patch.object(checks, "landmark_attention", slightly_off):
        assert not any(line["ok"] for line in checks.layouts(torch.float32, 16, 8, TINY))
