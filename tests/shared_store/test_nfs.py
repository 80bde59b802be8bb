"""A store that machines share by NFS 4: each of them saves, restores and deletes as if it was alone with it."""

from __future__ import annotations

import uuid

import pytest
from notebooks import wait_until

from shared_store.machines import Cluster, Machine

pytestmark = pytest.mark.timeout(900)
ways = pytest.mark.parametrize(
    "cluster",
    [("vers=4.2",), ("vers=4.0",), ("vers=4.2,nocto,actimeo=600",)],
    indirect=True,
    ids=["4.2", "4.0", "rarely"],
)
"""Also with a client that asks the server as rarely as possible."""

_WORK = """
def work(me, others, rounds):
    import random
    common = [random.Random(n).randbytes(300_000) for n in range(6)]
    for n in range(rounds):
        files = {"pages-1.img": common[n % 6] + random.randbytes(100_000), "core-1.img": b"core" * 10}
        save(store, f"{me}-{n}", files=files)
        assert read_back(store, f"{me}-{n}") == files
        for name in [m.name for m in store.list() if m.name.split("-")[0] in others]:
            try:
                assert read_back(store, name)
            except NoSuchSnapshot:
                pass
        if n >= 2:
            store.remove(f"{me}-{n - 2}")
        store.compact()
"""
_LEFT = "[str(p) for p in store.root.rglob('*') if '.nfs' in p.name or p.name.endswith('.tmp')]"


@pytest.fixture
def machines(cluster: Cluster) -> list[Machine]:
    """The server and two clients, and a new store."""
    name = f"store-{uuid.uuid4().hex[:6]}"
    for machine in cluster.machines:
        machine.does(f"store = Store(Path(SHARED, {name!r}), trust)")
    cluster.store = name
    return cluster.machines


@ways
def test_all_save_restore_remove_and_collect_at_once(machines: list[Machine]) -> None:
    machines[0].does("save(store, 'first')")
    names = [machine.name for machine in machines]
    for machine in machines:
        machine.does(_WORK)
        machine.begins(f"work({machine.name!r}, {names}, 8)")
    for machine in machines:
        machine.answer()
    for machine in machines:
        assert machine.does("sorted(m.name for m in store.list())") == sorted(
            ["first", *(f"{name}-{n}" for name in names for n in (6, 7))]
        )
        checked = machine.does("checked = store.check(read_data=True)", "[fault.why for fault in checked.faults]")
        assert checked == []
    assert machines[1].does("store.collect().obstacle") == ""
    for machine in machines:
        assert machine.does("litter(store)") == []
        assert machine.does(_LEFT) == []


@ways
def test_what_another_machine_saved_is_seen_at_once(machines: list[Machine]) -> None:
    _, a, b = machines
    a.does("save(store, 'first')")
    for name in ("one", "two"):
        look = f"def look():\n  try: return store.get({name!r}).name\n  except NoSuchSnapshot: return ''"
        assert b.does(look, "look()") == ""
        a.does(f"save(store, {name!r})")
        assert b.does("look()") == name
        assert b.does(f"read_back(store, {name!r}) == FILES") is True


@ways
def test_what_another_machine_writes_is_not_taken_for_damaged(machines: list[Machine]) -> None:
    """A client remembers how long a file was while it grew."""
    _, a, b = machines
    a.does("save(store, 'first')")
    a.does("writer = store.writer('it')", "fill(writer, {'a': __import__('random').randbytes(3_000_000)})")
    a.does("writer._packs.put(b'1' * 32, 10, 0, b'0123456789')", "None")
    assert b.does("store.used() > 0") is True  # it has looked at the pack
    a.does("writer.commit(message='', **ABOUT)", "writer.close()")
    assert b.does("len(read_back(store, 'it')['a'])") == 3_000_000


@pytest.mark.parametrize("where", [0, 2])
@ways
def test_a_collection_elsewhere_spares_what_is_being_saved(machines: list[Machine], where: int) -> None:
    """On another client, and on the server, where the folder is a disk."""
    a, other = machines[1], machines[where]
    a.does("save(store, 'first')", "writer = store.writer('it')", "fill(writer)")
    a.does("writer._packs.put(b'1' * 32, 10, 0, b'0123456789')", "None")
    for _ in range(2):
        collected = other.does("done = store.collect()", "[done.freed, done.obstacle]")
        assert collected == [0, ""]
    a.does("writer.commit(message='', **ABOUT)", "writer.close()")
    assert other.does("read_back(store, 'it') == FILES") is True


def test_a_machine_dies_in_a_save_and_what_it_left_is_collected(cluster: Cluster, machines: list[Machine]) -> None:
    _, a, b = machines
    a.does("save(store, 'first')", "writer = store.writer('it')", "fill(writer)")
    a.does("writer._store_files(lambda _: None, None)", "None")
    a.die()
    wait_until(lambda: b.does("store.collect().freed"), what="the lock of a dead machine stays")
    assert b.does("[litter(store), [fault.why for fault in store.check(read_data=True).faults]]") == [[], []]
    assert cluster.client("a").does("read_back(store, 'first') == FILES") is True


_TAKE = """
def take():
    global lease
    try:
        lease = store.lease(it.id, "x")
    except Busy as e:
        return f"{e.why} {e.then}"
    return ""
"""


def test_a_lease_is_one_machine_s_and_goes_with_it(cluster: Cluster, machines: list[Machine]) -> None:
    server, a, b = machines
    a.does("it = save(store, 'it')", "lease = store.lease(it.id, 'train.ipynb')")
    for other in (server, b):
        why = other.does("it = store.get('it')", _TAKE, "take()")
        assert "train.ipynb on a " in why
        assert "If a is down" in why
    a.die()
    wait_until(lambda: b.does("take()") == "", what="the lease of a dead machine stays")
    assert "x on b " in cluster.client("a").does("it = store.get('it')", _TAKE, "take()")
    b.does("lease.close()")
    assert cluster.client("a").does("take()") == ""
    cluster.client("a").does("lease.close()")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_machine_that_is_cut_off_in_a_save_does_not_say_that_it_saved(machines: list[Machine], moment: str) -> None:
    """The server gives its locks up, others delete what it has written, and then it is back.

    In the last step of a save, before it looks for the last time whether its lock stands, and after that.
    """
    _, a, b = machines
    a.does("save(store, 'first')", _STOPPED.format(moment=moment), "wait_until(stopped.is_set)", "cut_off(SERVER)")
    wait_until(lambda: b.does("store.collect().freed"), what="the lock of a machine that is cut off stays")
    a.does("be_back(SERVER)", "go_on.set()", "saving.join()")
    assert "its lock file" in a.does("outcome[0]")
    for machine in machines:
        assert machine.does("sorted(m.name for m in store.list())") == ["first"]
        assert machine.does("[fault.why for fault in store.check(read_data=True).faults]") == []
    a.does("save(store, 'it')")
    assert b.does("store.collect().obstacle") == ""
    assert b.does("read_back(store, 'it') == FILES") is True
    assert b.does("litter(store)") == []


_STOPPED = """
from jupyter_gpuckpt.store import committing
stopped, go_on, outcome = threading.Event(), threading.Event(), []
step = {{"before": "write_new", "after": "name_new"}}[{moment!r}]
does = getattr(committing, step)
def stop(*words):
    if {moment!r} == "before":
        does(*words)
    stopped.set()
    go_on.wait()
    if {moment!r} == "after":
        does(*words)
def save_it():
    setattr(committing, step, stop)
    try:
        save(store, "it", files={{**FILES, "new": __import__("random").randbytes(100_000)}})
        outcome.append("saved")
    except GpuckptError as e:
        outcome.append(f"{{e.what}} {{e.why}}")
    except BaseException as e:
        outcome.append(repr(e))
    finally:
        setattr(committing, step, does)
saving = threading.Thread(target=save_it)
saving.start()
"""


def test_clocks_that_are_off_delete_nothing_that_is_needed(machines: list[Machine]) -> None:
    server, a, b = machines
    now = int(a.does("time.time()"))
    try:
        a.does(f"time.clock_settime(time.CLOCK_REALTIME, {now} + 86400)")
        b.does(f"time.clock_settime(time.CLOCK_REALTIME, {now} - 86400)")
        a.does("save(store, 'ahead')", "reader = store.writer('unfinished')")
        b.does("save(store, 'behind')", "save(store, 'gone', files={'a': b'x' * 100_000})", "store.remove('gone')")
        for machine in machines:
            assert machine.does("store.collect(grace=3600).freed") == 0
        a.does("reader.close()")
        assert server.does("store.collect(grace=3600).waiting") > 0
        for machine in machines:
            assert machine.does("[read_back(store, name) == FILES for name in ('ahead', 'behind')]") == [True, True]
            assert machine.does("store.collect().obstacle") == ""
        assert server.does("litter(store)") == []
    finally:
        for client in (a, b):
            client.does(f"time.clock_settime(time.CLOCK_REALTIME, {now})")


@ways
def test_a_home_there_has_no_running_kernels_in_it(machines: list[Machine]) -> None:
    _, a, _ = machines
    a.does("import os, subprocess", "from jupyter_gpuckpt import settings", "None")
    a.does("subprocess.run(['mount', '-t', 'tmpfs', 'own', '/var/tmp'], check=True)", "None")
    a.does("os.environ.pop('JUPYTER_RUNTIME_DIR', None)", "os.environ['JUPYTER_DATA_DIR'] = f'{SHARED}/home'", "None")
    assert a.does("str(settings.kernels_dir())") == "/var/tmp/gpuckpt-0"
    a.does("os.environ['JUPYTER_RUNTIME_DIR'] = f'{SHARED}/home/runtime'", "None")
    assert a.does("settings.kernels_dir() == Path(SHARED, 'home', 'runtime', 'gpuckpt')") is True
