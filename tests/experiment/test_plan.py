import re

import pytest

from landmark.experiment.plan import GPU, Machine, describe, disk, row_cost, run_cost

VOCABULARY = 50304


def test_parameters_are_the_papers_and_training_costs_six_flops_for_each_and_attention_that_sees_a_cache(configure):
    assert run_cost("a", configure(), VOCABULARY, False).parameters == (202_531_840, 151_020_544)
    assert run_cost("a", configure("cmt=on"), VOCABULARY, False).parameters == (202_531_840 + 1024, 151_020_544 + 1024)
    shared = 12 * 2 * 1024 * 6 * 128  # keys and values of two heads in place of eight
    assert run_cost("a", configure("model.num_kv_heads=2"), VOCABULARY, False).parameters[1] == 151_020_544 - shared
    config = configure("model=transformer")
    job = run_cost("a", config, VOCABULARY, False)
    assert job.tokens == 240_000 * 128 * 512
    assert job.flops / job.tokens == pytest.approx(6 * 202_531_840 + 12 * 12 * 1024 * 256.5)
    # Segments of 2048 in windows of 256: only the first window has no cache.
    costs = [run_cost("a", configure(f"model={m}"), VOCABULARY, False) for m in ("transformer", "transformer_xl")]
    plain, xl = (cost.flops / cost.tokens for cost in costs)
    assert xl - plain == pytest.approx(12 * 12 * 1024 * (128.5 + 256 * 7 / 8 - 256.5))


def test_models_of_transformers_are_counted(configure, tmp_path):
    """By their own configuration, without weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    words = ["model=pretrained_landmark", f"model.name={tmp_path}", "tokenizer=bytes"]
    total = sum(parameter.numel() for parameter in model.parameters())
    cost = run_cost("a", configure(*words), 320, False)
    assert cost.parameters == (total, total - 2 * 320 * 16)
    assert cost.flops / cost.tokens == pytest.approx(6 * total + 12 * 2 * 16 * 256.5)


def test_a_gpu_has_a_range_and_no_training_takes_less_than_its_kernels_need(configure):
    small = run_cost("a", configure("size=nano"), 320, False)
    low, high = small.gpu_hours
    assert low >= 4000 * 4 * 0.0005 / 3600
    assert 2 <= high / low <= 8
    large = run_cost("a", configure(), VOCABULARY, False)
    assert large.gpu_hours[0] == pytest.approx(large.flops / (0.3 * 989e12) / 3600)
    text = describe([small, row_cost("row", configure(), VOCABULARY, False, None)], Machine(2, 0, []))
    assert "one H100 is assumed, after one H200: 8% to 30% of its peak" in text
    assert re.search(r"^row row +missing .* \?  +\?  +the split's size is unknown$", text, re.MULTILINE)


def test_evaluation_reads_the_budget_or_the_whole_split(configure):
    row = row_cost("a", configure("model=transformer", "size=nano"), 320, False, 3_000_000)
    assert row.tokens == 250_000
    whole = row_cost("a", configure("model=transformer"), VOCABULARY, False, 3_000_000)
    assert whole.tokens == 3_000_000
    landmark = row_cost("a", configure("size=nano"), 320, False, 3_000_000)
    assert landmark.tokens == 250_000 * 51 / 50


@pytest.mark.parametrize("asked", ["eval.task=vt", "eval.task=copy", "data=passkey"])
def test_prompts_and_probes_are_counted_whatever_the_budget(configure, asked):
    plain = configure("model=transformer", "size=nano", asked, "eval.prompts=7", "eval.length=600", "eval.tokens=8192")
    assert row_cost("a", plain, 320, False, 3_000_000).tokens == 7 * 600


def record(kind, hardware, rate=1000.0):
    return {
        "labels": {"size": "nano"},
        "settings": {"model": {"kind": kind}},
        "results": {"tokens_per_second": rate, "flops_per_token": 2e6},
        "provenance": {"hardware": hardware},
    }


def test_speed_is_that_of_earlier_runs_on_like_hardware(configure):
    job = run_cost("a", configure("size=nano", "model=transformer"), 320, False)
    runs = [
        record("transformer", {"cores": 2}),
        record("transformer", {"cores": 2}, 3000.0),
        record("transformer", {"cores": 64}, 1e6),
        record("landmark", {"cores": 2}, 1e6),
        record("transformer", {"cores": 2, "gpus": ["H100"]}, 5e6),
    ]
    assert Machine(2, 0, runs).speed(job) == (2000.0 * 2e6, "measured, 2 runs")
    assert Machine(2, 1, runs).speed(job) == (5e6 * 2e6, "measured, 1 run")
    assert Machine(2, 2, runs).speed(job)[0] == 2 * GPU
    assert "assumed" in Machine(3, 0, runs).speed(job)[1]


def test_disk_is_weights_and_the_checkpoints_of_one(configure):
    job = run_cost("run-a", configure("size=nano"), 320, False)
    assert "829 K, 788 K without embeddings" in describe([job], Machine(2, 0, []))
    weights = 4 * job.parameters[0]
    assert disk([job, job]) == 2 * weights + 9 * weights
    assert disk([]) == 0


def test_the_hours_of_a_plan_add_up(configure):
    """Each is rounded up as it is shown, and the total is the sum of what is shown."""
    config = configure("size=nano", "model=transformer")
    costs = [row_cost(f"row{number}", config, 320, False, 250_000) for number in range(7)]
    lines = describe(costs, Machine(2, 0, [])).splitlines()
    shown = [int(re.search(r"(\d+) s  ", line)[1]) for line in lines[1:8]]  # pyright: ignore
    assert len(set(shown)) == 1
    assert 0 < shown[0] < 60
    assert f"about {sum(shown)} s here" in lines[-3]
    years = describe([run_cost("run", configure(), VOCABULARY, False)], Machine(2, 0, []))
    assert re.search(r"about \d{1,3}(,\d{3})+ h here", years), "no tenth of an hour"
