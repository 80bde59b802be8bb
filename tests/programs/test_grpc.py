"""gRPC between a kernel and a server that a cell started."""

from __future__ import annotations

import pytest
from copies import forking
from notebooks import Notebook

SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
class Words(grpc.GenericRpcHandler):
    said = 0
    def service(self, details):
        if details.method == "/words/count":
            return grpc.unary_unary_rpc_method_handler(self.count)
        return grpc.stream_stream_rpc_method_handler(self.loud)
    def count(self, request, context):
        Words.said += 1
        return str(Words.said).encode()
    def loud(self, requests, context):
        for request in requests:
            yield request.upper()
server = grpc.server(ThreadPoolExecutor(4), handlers=[Words()])
port = server.add_insecure_port(sys.argv[1])
server.start()
print(port, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_calls_and_a_stream_go_on(notebook: Notebook, address: str) -> None:
    notebook.run(f"""
        import queue, subprocess, sys
        import grpc
        child = subprocess.Popen([sys.executable, "-c", {SERVER!r}, "{address}:0"], stdout=subprocess.PIPE)
        channel = grpc.insecure_channel("{address}:%d" % int(child.stdout.readline()))
        count = channel.unary_unary("/words/count")
        to_say = queue.Queue()
        heard = channel.stream_stream("/words/loud")(iter(to_say.get, None))
        def loud(words):
            to_say.put(words)
            return next(heard)
    """)
    assert notebook.value("loud(b'hello'), count(b'', timeout=20)") == "b'HELLO' b'1'"
    notebook.run("%gpuckpt save here")
    check = "loud(b'again'), count(b'', timeout=20), loud(b'once more')"
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value(check) == "b'AGAIN' b'2' b'ONCE MORE'"
    with forking() as fork:
        for copy in fork(notebook, count=2):
            assert copy.value(check) == "b'AGAIN' b'3' b'ONCE MORE'"
    assert notebook.value(check) == "b'AGAIN' b'3' b'ONCE MORE'"
