"""A KV cache of blocks with mean keys: how a pretrained model reads a long text without training.

`settings` and `cache` hold a text, `attention` reads it; `prefill_kernels` and `decode_kernels` do so on a GPU.
"""
