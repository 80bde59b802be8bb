"""Freezing and thawing process trees: CRIU for the CPU side, the CUDA driver for the GPU side."""
