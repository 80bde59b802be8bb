"""What a notebook or a job does in these tests: it counts, and has a secret by which it is known again."""

from __future__ import annotations

__all__ = ["COUNTING"]

COUNTING = """
import os, threading, time
secret, counted = os.urandom(8).hex(), [0]
def count():
    while True:
        counted[0] += 1
        time.sleep(0.05)
threading.Thread(target=count, daemon=True).start()
print(secret, counted[0])
"""
"""A cell."""
