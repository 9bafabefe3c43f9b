"""The Triton kernels. Importing this folder loads no Triton: kernels are imported when they are first run."""
