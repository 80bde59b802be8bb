"""Redis, MariaDB, etcd, Mosquitto and PostgreSQL, started by a cell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from copies import forking
from job_programs import free_port
from notebooks import Notebook, wait_until

from jupyter_gpuckpt.errors import Refused

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


MARIADB = """
import pymysql, subprocess, time
folder = "{folder}/data"
subprocess.run(["mariadb-install-db", "--user=root", "--datadir=" + folder], check=True, capture_output=True)
server = subprocess.Popen(
    ["mariadbd", "--no-defaults", "--user=root", "--datadir=" + folder, "--socket={folder}/socket", "--port={port}",
     "--bind-address=127.0.0.1"], stderr=subprocess.PIPE, text=True,
)
for line in server.stderr:
    if "ready for connections" in line:
        break
def connect():
    return pymysql.connect(unix_socket="{folder}/socket", user="root")
connect().cursor().execute("create user me@localhost")
connect().cursor().execute("grant all on *.* to me@localhost")
client = pymysql.connect(host="127.0.0.1", port={port}, user="me", autocommit=True).cursor()
client.execute("create database words")
client.execute("create table words.known (word varchar(400))")
client.execute("insert into words.known values ('first')")
other = connect()
changing = other.cursor()  # a transaction that is open
changing.execute("insert into words.known values ('second')")
def known(cursor):
    cursor.execute("select word from words.known order by word")
    return [word for word, in cursor.fetchall()]
"""


def test_mariadb_goes_on_with_its_connections_and_transactions(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(MARIADB.format(port=free_port("tcp"), folder=tmp_path))
    notebook.run("%gpuckpt save here")
    for _ in range(2):
        assert notebook.value("known(client), known(changing)") == "['first'] ['first', 'second']"
        notebook.run("other.commit()")
        notebook.run("client.executemany('insert into words.known values (%s)', [('x' * 400,)] * 20_000)")
        assert notebook.value("len(known(client))") == "20002"
        restored = notebook.run("%gpuckpt restore here --discard").text
        assert "Files that the kernel uses have changed since the save: " in restored
        assert str(tmp_path / "data") in restored
    notebook.run("client.execute('check table words.known')")
    assert notebook.value("client.fetchall()") == "(('words.known', 'check', 'status', 'OK'),)"
    with forking() as fork, pytest.raises(Refused, match=r"Only one program can have these files locked: .*ibdata1"):
        fork(notebook)


ETCD = """
import subprocess
address, peers = "http://127.0.0.1:{port}", "http://127.0.0.1:{other}"
server = subprocess.Popen(
    ["etcd", "--data-dir", "{folder}/data", "--listen-client-urls", address, "--advertise-client-urls", address,
     "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "default=" + peers],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
def ask(*words):
    command = ["env", "ETCDCTL_API=3", "etcdctl", "--endpoints", address, *words]
    return subprocess.run(command, capture_output=True, text=True)
while ask("endpoint", "health").returncode:
    pass
def known(key):
    return ask("get", key, "--print-value-only").stdout.strip()
ask("put", "colour", "green")
"""


def test_etcd_goes_on_with_its_database_as_it_was(notebook: Notebook, tmp_path: Path) -> None:
    """It has a database of bbolt's open, in which a commit would overwrite what others have written since."""
    notebook.run(ETCD.format(port=free_port("tcp"), other=free_port("tcp"), folder=tmp_path))
    database = tmp_path / "data" / "member" / "snap" / "db"
    wait_until(lambda: time.time() - database.stat().st_mtime > 1, what="it never comes to rest")
    notebook.run("%gpuckpt save here")
    notebook.run("%gpuckpt restore here")
    assert notebook.value("known('colour')") == "green"
    before = database.stat().st_mtime_ns
    notebook.run("ask('put', 'colour', 'red')")
    wait_until(lambda: database.stat().st_mtime_ns > before, what="it never commits")
    refused = notebook.fails("%gpuckpt restore here --discard")
    assert refused.ename == "Refused"
    assert f"has {database} open, a database of bbolt's" in refused.text
    assert notebook.value("known('colour')") == "red"
    database.rename(tmp_path / "away")
    notebook.run("%gpuckpt restore here --discard")
    assert notebook.value("known('colour')") == "green"


MOSQUITTO = """
import queue, subprocess, time
import paho.mqtt.client as mqtt
with open("{folder}/settings", "w") as settings:
    settings.write("listener {port} 127.0.0.1\\nallow_anonymous true\\nuser root\\n")
broker = subprocess.Popen(["mosquitto", "-c", "{folder}/settings"])
heard, there = queue.Queue(), queue.Queue()
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
client.on_message = lambda client, _, message: heard.put(message.payload)
client.on_subscribe = lambda *_: there.put(True)
client.on_disconnect = lambda *_: heard.put(b"disconnected")
while True:
    try:
        client.connect("127.0.0.1", {port}, keepalive=2)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
client.loop_start()
client.subscribe("news", 1)
assert there.get(timeout=20)
def tell(what):
    client.publish("news", what, qos=2).wait_for_publish(20)
    return heard.get(timeout=20)
"""


def test_mosquitto_and_its_subscribers_go_on(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(MOSQUITTO.format(port=free_port("tcp"), folder=tmp_path))
    assert notebook.value("tell('before')") == "b'before'"
    notebook.run("%gpuckpt save here")
    assert notebook.value("tell('after')") == "b'after'"
    for word in ("one", "two"):
        notebook.run("%gpuckpt restore here --discard")
        assert notebook.value(f"tell({word!r})") == f"b{word!r}"
    with forking() as fork:
        (copy,) = fork(notebook)
        for one in (copy, notebook):
            assert one.value("tell('more')") == "b'more'"


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
