"""The names of a server's kernels are told at any moment, also while one has only begun to start."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from jupyter_gpuckpt.server.handlers import kernel_names


def test_a_kernel_that_the_server_does_not_know_all_of_yet_is_told_too() -> None:
    async def started_by_half() -> None:
        manager = AsyncMappingKernelManager()
        superclass = manager.pinned_superclass
        # What the server's manager does first; what it adds to the kernel afterwards is missing at this moment.
        kernel_id = await superclass._async_start_kernel(manager, kernel_name="python3")
        try:
            assert kernel_names(manager) == {kernel_id: "python3"}
        finally:
            await superclass._async_shutdown_kernel(manager, kernel_id, now=True)
        assert kernel_names(manager) == {}

    with ThreadPoolExecutor(1) as elsewhere:  # a browser that is held by this thread has a loop running in it
        elsewhere.submit(asyncio.run, started_by_half()).result()
