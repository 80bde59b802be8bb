"""The GPU side of what a keeper does: freezing and bringing back, sleeping, and kernels that share a GPU."""
