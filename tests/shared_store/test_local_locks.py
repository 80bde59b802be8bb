"""A store on a file system that keeps locks from other machines: NFS 3, mounted with `nolock`."""

from __future__ import annotations

import pytest
from notebooks import wait_until

from shared_store.machines import Cluster

_TAKE = """
def take():
    global lease
    try:
        lease = store.lease(it.id, "x")
    except Busy as e:
        return f"{e.why} {e.then}"
    return None
"""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.parametrize("cluster", [("vers=3,nolock",)], indirect=True, ids=["3"]),
]


def test_a_session_of_another_machine_counts_until_its_file_is_gone(cluster: Cluster) -> None:
    a, b = cluster.client("a"), cluster.client("b")
    a.does("from jupyter_gpuckpt.store.reach import locks_reach", "None")
    assert a.does("[locks_reach(Path(SHARED)), locks_reach(Path('/run'))]") == [False, True]
    a.does("first = save(store, 'first')", "writer = store.writer('it')", "fill(writer)")
    a.does("writer._store_files(lambda _: None, None)", "None")
    b.does("save(store, 'old', files={'a': b'x' * 9999})", "store.remove('old')")
    for _ in range(2):
        assert b.does("done = store.compact()", "[done.freed, done.obstacle]") == [0, ""]
    a.does("writer.close()")
    assert a.does("litter(store)") == []

    a.does("writer = store.writer('it')", "fill(writer)", "writer.commit(message='', **ABOUT)")
    a.does("writer = store.writer('never')", "fill(writer)")
    a.die()
    assert b.does("store.collect().freed") == 0
    session = b.does("session, = [p for p in (store.root / 'locks').iterdir() if p.name != 'collect']", "str(session)")
    assert b.does("session.unlink()", "store.collect().freed > 0", f"Path({session!r}).exists()") is False
    assert b.does("[litter(store), read_back(store, 'it') == FILES]") == [[], True]


def test_a_lease_of_another_machine_stands_until_its_file_is_gone(cluster: Cluster) -> None:
    a, b = cluster.client("a"), cluster.client("b")
    a.does("it = save(store, 'leased')", "lease = store.lease(it.id, 'train.ipynb')")
    assert "train.ipynb on a " in b.does("it = store.get('leased')", _TAKE, "take()")
    a.does("lease.close()")
    wait_until(lambda: b.does("take()") is None)
    b.does("lease.close()")
    cluster.client("a").does("it = store.get('leased')", "lease = store.lease(it.id, 'train.ipynb')")
    a.die()
    said = b.does("take()")
    assert "train.ipynb on a " in said
    path = said.partition("rm ")[2].partition("`")[0]
    assert b.does(f"Path({path!r}).unlink()", "take()") is None
