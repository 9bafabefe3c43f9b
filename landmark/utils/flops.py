"""FLOPs of a training step and peak FLOP/s of devices, for the model FLOPs utilisation (MFU)."""

# Dense bfloat16 matrix FLOP/s from the vendors' data sheets (without sparsity); the first matching name is used.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "RTX A6000": 155e12,
}


def keys_per_query(
    length: int, window: int | None = None, cache: int | None = None, both_ways: bool | None = False
) -> float:
    """Mean number of keys that a query attends to in a window of `length` tokens: causally, or both ways. window,
    cache: of a recurrent model, which reads `window` tokens at a time, with up to `cache` keys before.
    """
    if both_ways:
        return length
    if window is None:
        return (length + 1) / 2
    total = 0.0
    for start in range(0, length, window):
        size = min(window, length - start)
        total += size * ((size + 1) / 2 + min(start, cache or 0))
    return total / length


def flops_per_token(parameters: int, num_layers: int, width: int, keys: float) -> float:
    """Training FLOPs a token: 6 per parameter (also of tied embeddings), 12·layers·width per key (PaLM, app. B)."""
    return 6.0 * parameters + 12.0 * num_layers * width * keys


def peak_flops(device_name: str, precision: str) -> float | None:
    """Peak FLOP/s of a GPU by its name, or None if unknown (other devices, other precisions)."""
    if not precision.startswith("bf16"):
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name.lower() in device_name.lower()), None)
