"""Stands for a kernel where no kernel is needed: runs cells of Python in one process.

Each line in is ``{"cell": SOURCE}``; the cell's ``answer`` is the line out. Standard library only.
"""

import json
import os
import sys
import traceback

out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
space: dict[str, object] = {}
for line in sys.stdin:
    space["answer"] = None
    try:
        exec(json.loads(line)["cell"], space)
        reply = {"answer": space["answer"]}
    except BaseException:
        reply = {"error": traceback.format_exc()}
    print(json.dumps(reply), file=out)
