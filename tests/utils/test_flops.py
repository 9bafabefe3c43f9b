import pytest

from landmark.utils.flops import keys_per_query, peak_flops


@pytest.mark.parametrize(("length", "window", "cache"), [(48, 16, 16), (50, 16, 24), (40, 16, 0), (10, 16, 16)])
def test_keys_of_recurrent_windows(length, window, cache):
    seen = []
    for position in range(length):
        start = position // window * window
        seen.append(position - start + 1 + min(start, cache))
    assert keys_per_query(length, window, cache) == pytest.approx(sum(seen) / length)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A10G", 70e12),
        ("cpu", None),
    ],
)
def test_peak_by_name(name, peak):
    assert peak_flops(name, "bf16-mixed") == peak
    assert peak_flops(name, "32-true") is None
