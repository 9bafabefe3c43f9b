"""The Triton kernels. Importing this folder loads no Triton: the kernels are imported when one is first run."""
