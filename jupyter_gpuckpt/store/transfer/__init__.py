"""Snapshots on their way: into one file, to remotes and back, as they are or encrypted."""
