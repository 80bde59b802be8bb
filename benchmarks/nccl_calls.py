"""What the library in front of NCCL costs an operation: ``python -m benchmarks.nccl_calls`` (a C compiler, no GPU).

Behind it is an NCCL that does nothing, so that the time of the calls alone is measured; with the library and without,
taking turns. On a GPU the library also asks the driver, once for each operation, whether its stream is captured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from jupyter_gpuckpt.installed import NCCL_LIBRARY

_ROUNDS, _CALLS = 7, 2_000_000
_NCCL = """
#include <stdlib.h>
#include <string.h>
typedef struct { char bytes[128]; } id;
int ncclGetVersion(int *version) { *version = 22809; return 0; }
int ncclGetUniqueId(id *new) { memset(new, 1, sizeof *new); return 0; }
int ncclCommInitRank(void **comm, int size, id of, int rank) { return (*comm = malloc(64)) ? 0 : 2; }
int ncclCommDestroy(void *comm) { free(comm); return 0; }
int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) { return 0; }
"""
_PROGRAM = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
typedef struct { char bytes[128]; } id;
int ncclGetUniqueId(id *), ncclCommInitRank(void **, int, id, int);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int main(int count, char **words) {
  id of;
  void *comm;
  if (ncclGetUniqueId(&of) || ncclCommInitRank(&comm, 2, of, 0)) return 1;
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (int left = atoi(words[1]); left; left--)
    if (ncclAllReduce(0, 0, 1, 7, 0, comm, 0)) return 1;
  clock_gettime(CLOCK_MONOTONIC, &ended);
  printf("%f", (ended.tv_sec - began.tv_sec) * 1e9 + ended.tv_nsec - began.tv_nsec);
}
"""


def main() -> None:
    """Measure and print."""
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        library, program = Path(folder, "libnccl.so.2"), Path(folder, "program")
        (source := Path(folder, "nccl.c")).write_text(_NCCL)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source], check=True)
        (source := Path(folder, "program.c")).write_text(_PROGRAM)
        subprocess.run(["cc", "-O2", "-o", program, source, library, f"-Wl,-rpath,{folder}"], check=True)
        for _ in range(_ROUNDS):
            for has_library, times in took.items():
                more = {"LD_PRELOAD": str(NCCL_LIBRARY), "GPUCKPT_RUN_DIR": folder} if has_library else {}
                done = subprocess.run(
                    [program, str(_CALLS)], env={**os.environ, **more}, stdout=subprocess.PIPE, check=True
                )
                times.append(float(done.stdout) / _CALLS)
    for has_library, times in took.items():
        what = "with the library" if has_library else "without"
        print(f"{what:16} {statistics.median(times):6.1f} ns a call ({min(times):.1f} to {max(times):.1f})")


if __name__ == "__main__":
    main()
