"""The keeper: one process a kernel that starts, freezes, stores, restores and ends it, and outlives the server."""
