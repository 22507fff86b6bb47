"""Inference engines: vLLM on CPU and CUDA, and a scripted engine for tests."""
