"""A KV cache of blocks: how a pretrained model reads a long text without training.

`settings` and `cache` hold a text, `attention` reads it, and a `scorer` finds blocks by what stands for them;
`prefill_kernels` and `decode_kernels` do so on a GPU.
"""
