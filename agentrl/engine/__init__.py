"""Inference engines: vLLM on CPU and CUDA."""
