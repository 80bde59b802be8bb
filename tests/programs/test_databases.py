"""Redis and PostgreSQL, started by a cell."""

from __future__ import annotations

from pathlib import Path

from copies import forking
from job_programs import free_port
from notebooks import Notebook

REDIS = """
import subprocess, redis
server = subprocess.Popen(
    ["redis-server", "--port", "{port}", "--save", "", "--dir", "{folder}"], stdout=subprocess.DEVNULL
)
client = redis.Redis(port={port}, retry=None)
import time
def is_up():
    try:
        return client.ping()
    except redis.ConnectionError:
        return False
while not is_up():
    time.sleep(0.05)

client.set("colour", "green")
listener = client.pubsub(ignore_subscribe_messages=True)
listener.subscribe("news")
while not listener.subscribed or listener.get_message(timeout=0.1) is not None: pass
mine = client.client_id()
"""


def test_redis_has_its_keys_connections_and_subscribers(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(REDIS.format(port=free_port("tcp"), folder=tmp_path))
    notebook.run("client.publish('news', 'unread')")
    notebook.run("%gpuckpt save here")
    check = (
        "client.get('colour'), client.client_id() == mine, listener.get_message(timeout=20)['data'], "
        "client.incr('count'), client.publish('news', 'more')"
    )
    for _ in range(2):
        assert "TCP" not in notebook.run("%gpuckpt restore here").text
        assert notebook.value(check) == "b'green' True b'unread' 1 1"
    with forking() as fork:
        (copy,) = fork(notebook)
        for one in (copy, notebook):
            assert one.value(check) == "b'green' True b'more' 2 1"


POSTGRES = """
import glob, os, subprocess
folder = "{folder}/data"
os.mkdir(folder)
as_nobody = {{"user": 65534, "group": 65534, "extra_groups": []}}  # it does not run as root
os.chown(folder, 65534, 65534)
programs = max(glob.glob("/usr/lib/postgresql/*/bin"))
subprocess.run([programs + "/initdb", "-D", folder, "-A", "trust"], check=True, capture_output=True, **as_nobody)
server = subprocess.Popen(
    [programs + "/postgres", "-D", folder, "-p", "{port}", "-k", "", "-h", "127.0.0.1"],
    stderr=subprocess.PIPE, text=True, **as_nobody,
)
for line in server.stderr:
    if "ready to accept connections" in line:
        break
import psycopg
client = psycopg.connect("host=127.0.0.1 port={port} user=nobody dbname=postgres", autocommit=True)
client.execute("create table words (word text)")
client.execute("insert into words values ('first')")
def words():
    return client.execute("select word from words").fetchall()
"""


def test_postgresql_is_refused_in_words_and_saved_when_it_is_stopped(notebook: Notebook, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == tmp_path or folder.name.startswith("pytest"):
            folder.chmod(0o755)  # the server has another user
    notebook.run(POSTGRES.format(port=free_port("tcp"), folder=tmp_path))
    refused = notebook.fails("%gpuckpt save here")
    assert refused.ename == "Refused"
    assert "(postgres) uses System V shared memory, which CRIU cannot save" in refused.text
    assert notebook.value("words()") == "[('first',)]"
    notebook.run("client.close(); server.terminate(); server.wait(60)")
    notebook.run("%gpuckpt save here")
