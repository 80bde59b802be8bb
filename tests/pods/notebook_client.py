"""A program for `python -c` in a pod: runs a cell of a notebook at the server there, and prints what it showed.

Words: the token, the notebook, the cell.
"""

import json
import sys
import time
import urllib.request
import uuid

import websocket

token, notebook, cell = sys.argv[1:]
auth = {"Authorization": f"token {token}"}


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:8888/{path}", data, auth, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def up():
    try:
        return ask("GET", "api")
    except OSError:
        return None


until = time.monotonic() + 120
while not up() and time.monotonic() < until:
    time.sleep(0.2)
about = {"path": notebook, "type": "notebook", "name": notebook, "kernel": {"name": "python3-gpuckpt"}}
kernel = ask("POST", "api/sessions", about)["kernel"]["id"]
address = f"ws://127.0.0.1:8888/api/kernels/{kernel}/channels"
socket = websocket.create_connection(address, timeout=120, header=[f"Authorization: token {token}"])
message = uuid.uuid4().hex
header = {
    "msg_id": message,
    "msg_type": "execute_request",
    "username": "",
    "session": message,
    "date": "",
    "version": "5.3",
}
content = {"code": cell, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
asked = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell", "buffers": []}
socket.send(json.dumps(asked))
while True:
    told = json.loads(socket.recv())
    if told["parent_header"].get("msg_id") != message:
        continue
    kind, content = told["msg_type"], told["content"]
    if kind == "stream":
        print(content["text"], end="")
    elif kind == "display_data":
        print(content["data"].get("text/plain", ""))
    elif kind == "error":
        print(content["ename"], content["evalue"])
    elif kind == "status" and content["execution_state"] == "idle":
        break
socket.close()
