"""Triton kernels of DeepSeek-V4; imported only where a GPU, or the interpreter, runs them."""
