"""Freeze a tree of processes, and bring it back: no Jupyter and no store in here."""
