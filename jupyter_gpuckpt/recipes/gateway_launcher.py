# A launcher by which kernels of gateway_provisioners can be saved; it takes the place of its launch_ipykernel.py
#
# Where the kernels run there is jupyter_gpuckpt, with CRIU or a broker. On the gateway's machine, or in the image:
#     jupyter ssh-spec install --kernel-name=python-saved --display-name="Python (saved)"
#     jupyter gpuckpt recipe gateway_launcher.py > .../kernels/python-saved/scripts/launch_ipykernel.py
# In Kubernetes: deploy/kubernetes/gateway has the image and the pod.
# A kernel is restored where it runs, at the ports that the gateway knows. When the gateway stops it, it is lost.
import argparse
import multiprocessing
import os
import signal
import threading
from pathlib import Path

from jupyter_client import KernelManager
from jupyter_core.paths import jupyter_runtime_dir
from server_listener import setup_server_listener  # gateway_provisioners' own, beside this file


def main() -> None:
    """Start a kernel as the gateway asks for, and pass on what it asks for afterwards."""
    parser = argparse.ArgumentParser()
    for name in ("kernel-id", "response-address", "public-key"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port-range", default="0..0")
    parser.add_argument("--transport-encryption")
    asked, _ = parser.parse_known_args()
    lower, _, upper = asked.port_range.partition("..")
    runtime = Path(jupyter_runtime_dir())
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection_file = str(runtime / f"kernel-{asked.kernel_id}.json")

    # What the gateway wants of its kernel comes as signals to this process.
    ending, interrupts = threading.Event(), threading.Semaphore(0)
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, lambda *_: interrupts.release())
    told = (asked.response_address, asked.kernel_id, asked.public_key, "none", asked.transport_encryption)
    setup_server_listener(connection_file, os.getpid(), int(lower), int(upper), *told)

    # The ports are those of the connection file, which the gateway has been sent.
    manager = KernelManager(kernel_name="python3-gpuckpt", connection_file=connection_file, cache_ports=False)
    manager.load_connection_file()
    manager.start_kernel()
    try:
        while not ending.wait(0.2) and manager.is_alive():
            if interrupts.acquire(blocking=False):
                manager.interrupt_kernel()
    finally:
        manager.shutdown_kernel(now=True)
        for listener in multiprocessing.active_children():
            listener.terminate()


if __name__ == "__main__":
    main()
