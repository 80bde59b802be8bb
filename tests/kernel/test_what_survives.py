"""What survives a restore: one test a row of the table in docs/what-survives.md.

Every test makes something, saves, sees that the live kernel was not harmed by it, changes or destroys the thing, and
restores: what is found then came back.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from keeper_faults import Asked
from notebooks import PATIENCE, Notebook, StartKernel, wait_until


def save(notebook: Notebook, name: str = "here") -> None:
    assert notebook.run(f"%gpuckpt save {name}").shown[-1].startswith(f"Saved {name}: ")


def restore(notebook: Notebook, name: str = "here") -> str:
    said = notebook.run(f"%gpuckpt restore {name}").text
    assert f"Restored {name}, saved " in said
    return said


def value(notebook: Notebook, expression: str) -> str:
    return notebook.value(f"({expression})")


def grows(notebook: Notebook, expression: str) -> bool:
    """Whether a number in the kernel still goes up, with nobody asking it to."""
    before = int(value(notebook, expression))
    return bool(wait_until(lambda: int(value(notebook, expression)) > before, what=f"{expression} stands still"))


# -- Python objects


def test_arrays(notebook: Notebook) -> None:
    notebook.run("""
        import hashlib, numpy as np
        a = np.random.default_rng(1).standard_normal((2000, 500))
        view = a[::3, 1:7]
        digest = lambda: hashlib.sha256(a.tobytes()).hexdigest()
    """)
    before = value(notebook, "digest(), view.sum(), a.flags.writeable")
    save(notebook)
    assert value(notebook, "digest(), view.sum(), a.flags.writeable") == before
    notebook.run("a[:] = 0; a.flags.writeable = False")
    restore(notebook)
    assert value(notebook, "digest(), view.sum(), a.flags.writeable") == before
    # The view still is one.
    notebook.run("a[0, 1] = 123.0")
    assert value(notebook, "float(view[0, 0])") == "123.0"


def test_generators(notebook: Notebook) -> None:
    notebook.run("""
        def count():
            for i in range(100):
                yield i
        g = count()
    """)
    assert value(notebook, "next(g), next(g)") == "(0, 1)"
    save(notebook)
    assert value(notebook, "next(g), next(g)") == "(2, 3)"
    notebook.run("g.close()")
    restore(notebook)
    assert value(notebook, "next(g), next(g)") == "(2, 3)"


def test_closures(notebook: Notebook) -> None:
    notebook.run("""
        def counter():
            n = 0
            def step():
                nonlocal n
                n += 1
                return n
            return step
        step = counter(); step()
    """)
    save(notebook)
    assert value(notebook, "step()") == "2"
    notebook.run("step(); del step, counter")
    restore(notebook)
    assert value(notebook, "step()") == "2"


def test_random_streams(notebook: Notebook) -> None:
    notebook.run("""
        import random, numpy as np
        random.seed(); np.random.seed(); rng = np.random.default_rng(); random.gauss(0, 1)
        draw = lambda: [random.random(), random.gauss(0, 1), float(np.random.rand()), float(rng.standard_normal())]
    """)
    save(notebook)
    went_on = value(notebook, "draw()")
    notebook.run("random.seed(0); np.random.seed(0); rng = None")
    restore(notebook)
    assert value(notebook, "draw()") == went_on


def test_environment_variables_and_the_working_folder(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        import os, subprocess
        os.makedirs({str(tmp_path / "there")!r}); os.chdir({str(tmp_path / "there")!r})
        os.environ["MY_SETTING"] = "saved"; os.umask(0o027)
    """)
    told = "os.getcwd(), subprocess.check_output(['sh', '-c', 'echo $MY_SETTING $(pwd) $(umask)'], text=True)"
    save(notebook)
    before = value(notebook, told)
    assert "saved" in before
    assert "0027" in before
    notebook.run("os.chdir('/'); os.environ['MY_SETTING'] = 'changed'; os.umask(0o022)")
    restore(notebook)
    assert value(notebook, told) == before


def test_a_working_folder_that_was_removed(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import os; before = os.getcwd()")
    try:
        notebook.run(
            f"os.mkdir({str(tmp_path / 'gone')!r}); os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())"
        )
        save(notebook)
        notebook.run("os.chdir(before)")
        restore(notebook)
        assert value(notebook, "os.readlink('/proc/self/cwd')") == f"{tmp_path / 'gone'} (deleted)"
    finally:
        notebook.run("os.chdir(before)")


# -- threads, tasks and time


def test_threads_go_on_counting(notebook: Notebook) -> None:
    notebook.run("""
        import threading, time
        n, stop = 0, False
        def count():
            global n
            while not stop:
                n += 1
                time.sleep(0.001)
        thread = threading.Thread(target=count, name="counting"); thread.start()
        local = threading.local(); local.mine = "main"
    """)
    grows(notebook, "n")
    save(notebook)
    assert grows(notebook, "n")
    at = int(notebook.run("stop = True; thread.join(); n += 1_000_000; del local; print(n)").text)
    restore(notebook)
    assert int(value(notebook, "n")) < at
    assert grows(notebook, "n")
    assert value(notebook, "thread.is_alive(), thread.name, local.mine") == "(True, 'counting', 'main')"
    notebook.run("stop = True; thread.join(60)")
    assert value(notebook, "thread.is_alive()") == "False"


def test_locks_with_a_thread_that_waits(notebook: Notebook) -> None:
    notebook.run("""
        import threading
        lock, condition, passed = threading.Lock(), threading.Condition(), []
        def at_the_lock():
            with lock:
                passed.append("lock")
        def at_the_condition():
            with condition:
                waiting.set()
                condition.wait()
                passed.append("condition")
        waiting = threading.Event()
        lock.acquire()
        threads = [threading.Thread(target=f) for f in (at_the_lock, at_the_condition)]
        [t.start() for t in threads]; waiting.wait()
        def let_pass():
            lock.release()
            with condition:
                condition.notify()
            [t.join(60) for t in threads]
            return sorted(passed)
    """)
    save(notebook)
    assert value(notebook, "passed, lock.locked()") == "([], True)"
    assert value(notebook, "let_pass()") == "['condition', 'lock']"
    restore(notebook)
    assert value(notebook, "passed, lock.locked()") == "([], True)"
    assert value(notebook, "let_pass()") == "['condition', 'lock']"


def test_a_poll_without_a_time_limit_goes_on_waiting(notebook: Notebook) -> None:
    """Programs for which no signal can come, such as script(1), end at an EINTR."""
    notebook.run("""
        import ctypes, os, struct, threading
        libc, (r, w), found = ctypes.CDLL(None, use_errno=True), os.pipe(), []
        asked = ctypes.create_string_buffer(struct.pack("ihh", r, 1, 0))  # POLLIN
        thread = threading.Thread(target=lambda: found.append((libc.poll(asked, 1, -1), ctypes.get_errno())))
        thread.start()
        while open(f"/proc/self/task/{thread.native_id}/syscall").read().split()[0] != "7": pass
        def waited():
            os.write(w, b"x")
            thread.join(60)
            return found
    """)
    save(notebook)
    assert value(notebook, "waited()") == "[(1, 0)]"
    restore(notebook)
    assert value(notebook, "waited()") == "[(1, 0)]"


def test_asyncio_tasks(notebook: Notebook) -> None:
    notebook.run("""
        import asyncio
        ticks, mail = 0, asyncio.Queue()
        async def tick():
            global ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1
        async def echo():
            return await mail.get()
        ticking, echoing = asyncio.create_task(tick()), asyncio.create_task(echo())
        await asyncio.sleep(0.05)
    """)
    save(notebook)
    assert grows(notebook, "ticks")
    notebook.run("ticking.cancel(); echoing.cancel(); ticks += 1_000_000")
    restore(notebook)
    assert int(value(notebook, "ticks")) < 1_000_000
    assert grows(notebook, "ticks")
    assert notebook.run("mail.put_nowait('a letter'); print(await echoing)").text == "a letter"


def test_the_clock_never_steps_back_and_timers_fire(notebook: Notebook) -> None:
    for seconds in (2, 8, 32):  # more where the machine is so slow that they fire before the kernel is saved
        notebook.run(f"""
            import signal, threading, time
            fired = []
            signal.signal(signal.SIGALRM, lambda *_: fired.append("alarm"))
            signal.setitimer(signal.ITIMER_REAL, {seconds})
            timer = threading.Timer({seconds}, fired.append, ["timer"]); timer.start()
            before = time.monotonic(), time.perf_counter(), time.time()
        """)
        save(notebook, f"in-{seconds}")
        if value(notebook, "fired") == "[]":
            break
    notebook.run("signal.setitimer(signal.ITIMER_REAL, 0); timer.cancel(); fired = None")
    restore(notebook, f"in-{seconds}")
    after = "time.monotonic(), time.perf_counter(), time.time()"
    assert value(notebook, f"all(a > b for a, b in zip(({after}), before))") == "True"
    wait_until(lambda: value(notebook, "sorted(fired)") == "['alarm', 'timer']")


def test_processor_time_goes_on_from_the_save(notebook: Notebook) -> None:
    """And so `%%time` of the cell that was saved in, which has begun to count before."""
    notebook.run("""
        import os, resource, threading, time
        from time import process_time as imported
        def used():
            return (
                time.process_time(), time.process_time_ns(), imported(), time.thread_time(), time.thread_time_ns(),
                *os.times()[:4], *resource.getrusage(resource.RUSAGE_SELF)[:2],
            )
        while time.process_time() < 2: pass
        before = used()
    """)
    notebook.run("%%time\n%gpuckpt save here")
    restored = notebook.run("%gpuckpt restore here").text
    assert "CPU times: " in restored
    assert "-" not in restored.partition("CPU times: ")[2]
    assert value(notebook, "all(now >= then for now, then in zip(used(), before))") == "True"
    notebook.run("_, ended = os.waitpid(os.fork() or os._exit(int(time.process_time() > 1)), 0)")
    assert value(notebook, "ended") == "0"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor only")
def test_the_processors_that_threads_are_bound_to(notebook: Notebook) -> None:
    notebook.run("""
        import os, subprocess, sys, threading
        processors = sorted(os.sched_getaffinity(0))
        ready = threading.Event()
        def stay():
            os.sched_setaffinity(0, processors[1:2])  # its own thread's
            ready.set()
            threading.Event().wait()
        thread = threading.Thread(target=stay, daemon=True)
        thread.start()
        ready.wait()
        child = subprocess.Popen(["sleep", "10000"])
        os.sched_setaffinity(child.pid, processors[:1])
        def bound(of): return sorted(os.sched_getaffinity(of))
        def are_bound():
            return [bound(os.getpid()) == processors, bound(thread.native_id) == processors[1:2],
                    bound(child.pid) == processors[:1]]
    """)
    assert value(notebook, "are_bound()") == "[True, True, True]"
    notebook.run("%gpuckpt save here")
    notebook.run("os.sched_setaffinity(child.pid, processors)")
    assert "bound" not in notebook.run("%gpuckpt restore here").text
    assert value(notebook, "are_bound()") == "[True, True, True]"
    notebook.run("child.kill(); child.wait()")


def test_signal_handlers(notebook: Notebook) -> None:
    notebook.run("""
        import ctypes, os, signal, threading
        got = []
        signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
        ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG: when its parent ends, as criu does
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    """)
    save(notebook)
    notebook.run("os.kill(os.getpid(), signal.SIGUSR1)")
    assert value(notebook, "got == [signal.SIGUSR1]") == "True"
    notebook.run("signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.sigtimedwait([signal.SIGUSR2], 0)")
    assert value(notebook, "signal.sigpending()") == "set()"
    restore(notebook)
    notebook.run("os.kill(os.getpid(), signal.SIGUSR1)")
    assert value(notebook, "got == [signal.SIGUSR1]") == "True"
    assert value(notebook, "signal.sigpending() == {signal.SIGUSR2}") == "True"


# -- files and memory


def test_open_files_with_their_offset(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n")
    notebook.run(f"f = open({str(tmp_path / 'lines.txt')!r}); head = f.readline()")
    save(notebook)
    assert value(notebook, "f.readline()") == "two"
    notebook.run("f.read(); f.close()")
    restore(notebook)
    assert value(notebook, "head, f.tell()") == "('one\\n', 4)"
    assert value(notebook, "f.read()") == "two\nthree"


def test_a_log_that_grew_after_the_save_is_appended_to(notebook: Notebook, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    notebook.run(f"log = open({str(log)!r}, 'a', buffering=1); print('before', file=log)")
    save(notebook)
    notebook.run("print('after the save', file=log)")
    restore(notebook)
    notebook.run("print('after the restore', file=log)")
    # Files are the disk's, not the kernel's: what was written stays written, and nothing writes over it.
    assert log.read_text().splitlines() == ["before", "after the save", "after the restore"]


def test_a_log_that_grows_at_every_moment_is_no_obstacle(notebook: Notebook, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    writer = "import itertools, time\nfor n in itertools.count(): print(n, flush=True); time.sleep(1e-4)"
    notebook.run(f"""
        import subprocess, sys
        log = {str(log)!r}
        child = subprocess.Popen([sys.executable, "-c", {writer!r}], stdout=open(log, "w"))
        while not open(log).read(1): pass
        reader = open(log)
    """)
    save(notebook)
    for how in ("", " --in-place"):
        before = log.stat().st_size
        wait_until(lambda before=before: log.stat().st_size > before)
        notebook.run("lost = 1")
        notebook.run(f"%gpuckpt restore here{how}")
        assert value(notebook, "'lost' in globals(), child.poll()") == "(False, None)"
        assert value(notebook, "reader.read(2)") == "0"
        assert grows(notebook, "int(open(f'/proc/{child.pid}/fdinfo/1').read().split()[1])")


def test_a_file_that_was_deleted_but_is_open(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        import os, tempfile
        named = open({str(tmp_path / "gone")!r}, "w+"); os.unlink(named.name)
        nameless = tempfile.TemporaryFile("w+")
        for f in named, nameless:
            f.write("still here"); f.flush(); f.seek(6)
        # Two in folders that were removed, too, one with the longest name that there can be; of both folders, too.
        os.makedirs({str(tmp_path / "removed" / "inner")!r}); os.chdir({str(tmp_path)!r})
        within = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ("removed/x", "removed/inner/" + "y" * 255)]
        folders = [os.open(name, os.O_RDONLY) for name in ("removed/inner", "removed")]
        for fd in within: os.write(fd, b"within")
        import shutil; shutil.rmtree("removed")
    """)
    look = "[os.pread(fd, 9, 0) for fd in within], [os.listdir(fd) for fd in folders]"
    before = value(notebook, look)
    save(notebook)
    assert value(notebook, "named.read(), nameless.read()") == "('here', 'here')"
    notebook.run("[(f.truncate(0), f.close()) for f in (named, nameless)]")
    restore(notebook)
    assert value(notebook, "named.read(), nameless.read()") == "('here', 'here')"
    assert value(notebook, look) == before == "([b'within', b'within'], [[], []])"
    notebook.run("named.seek(0); named.write('written')")
    assert not (tmp_path / "gone").exists()
    assert list(tmp_path.glob("*.ghost")) == [], "names of a moment are left"


def test_a_file_that_was_replaced_and_has_another_name_left(notebook: Notebook, tmp_path: Path) -> None:
    # As package managers leave a library that they replace, whose packages are hard links into a cache.
    project, cache = tmp_path / "project", tmp_path / "cache"
    project.mkdir()
    cache.mkdir()
    for name in ("read", "mapped", "written"):
        (project / name).write_text(f"the old {name} file")
        (cache / name).hardlink_to(project / name)
    notebook.run(f"""
        import mmap, os
        os.chdir({str(project)!r})
        read, written = open("read", "rb", buffering=0), open("written", "r+b", buffering=0)
        with open("mapped", "rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
        start = read.read(4)
    """)
    for name in ("read", "mapped", "written"):
        (project / name).unlink()
    (project / "mapped").write_text("another, longer content")
    said = notebook.run("%gpuckpt save here").text
    assert f"{project / 'written'} was deleted under that name" in said
    assert f"{project / 'read'} was" not in said
    notebook.run("read.close(); written.close(); mapped.close()")
    restore(notebook)
    assert value(notebook, "start, read.read(), mapped[:]") == "(b'the ', b'old read file', b'the old mapped file')"
    # What it writes is its own from now on; and nothing is left of the names that criu uses for a moment.
    notebook.run("written.write(b'The new'); size = written.seek(0)")
    assert value(notebook, "written.read()") == "b'The new written file'"
    assert (cache / "written").read_text() == "the old written file"
    assert [(path.name, path.read_text()) for path in project.iterdir()] == [("mapped", "another, longer content")]
    save(notebook, "again")


def test_a_link_that_is_open_itself(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        import os
        os.symlink("nothing-is-here", {str(tmp_path / "link")!r})
        link = os.open({str(tmp_path / "link")!r}, os.O_PATH | os.O_NOFOLLOW)
    """)
    save(notebook)
    notebook.run("os.close(link)")
    restore(notebook)
    assert value(notebook, "os.readlink('', dir_fd=link)") == "nothing-is-here"


def test_mapped_files(notebook: Notebook, tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    data.write_bytes(b"a" * 8192)
    notebook.run(f"""
        import mmap
        f = open({str(data)!r}, "r+b")
        shared = mmap.mmap(f.fileno(), 8192)
        private = mmap.mmap(f.fileno(), 8192, access=mmap.ACCESS_COPY); private[0:3] = b"own"
        anonymous = mmap.mmap(-1, 8192); anonymous[0:3] = b"mem"
    """)
    save(notebook)
    assert value(notebook, "bytes(private[:4]), bytes(anonymous[:3])") == "(b'owna', b'mem')"
    notebook.run("private[0:3] = b'xxx'; anonymous[0:3] = b'xxx'; shared[4096:4099] = b'new'; shared.close()")
    restore(notebook)
    assert value(notebook, "bytes(private[:4]), bytes(anonymous[:3])") == "(b'owna', b'mem')"
    # A shared mapping is the file, which is as the disk has it.
    assert value(notebook, "bytes(shared[4096:4099])") == "b'new'"
    notebook.run("shared[0:1] = b'b'; shared.flush()")
    assert data.read_bytes()[:2] == b"ba"


def test_shared_memory(notebook: Notebook) -> None:
    notebook.run("""
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory("block", create=True, size=300_000); memory.buf[:5] = b"saved"
        def by_name():
            other = shared_memory.SharedMemory("block")
            found = bytes(other.buf[:5])
            other.close()
            return found
    """)
    look = "bytes(memory.buf[:5]), by_name()"
    save(notebook)
    assert value(notebook, look) == "(b'saved', b'saved')"
    notebook.run("memory.buf[:5] = b'xxxxx'; memory.close(); memory.unlink()")
    restore(notebook)
    assert value(notebook, look) == "(b'saved', b'saved')"
    notebook.run("memory.close(); memory.unlink()")


@pytest.mark.parametrize("files", [50, 5_000])
def test_new_shared_memory_is_taken_for_none_of_before(notebook: Notebook, files: int) -> None:
    """Device and number of its file are new: torch takes a tensor that another process sends for one that has both."""
    notebook.run(f"""
        import os
        def made(count):
            found = set()
            for _ in range(count):
                fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR); about = os.fstat(fd); os.close(fd)
                found.add((about.st_dev, about.st_ino))
            return found
        known = made({files})
    """)
    for _ in range(3):  # the second one often gets the device of the kernel that was saved
        notebook.run("%gpuckpt save again --replace")
        restore(notebook, "again")
        notebook.run(f"new = made({files}); found = len(new), len(new & known); known |= new")
        assert value(notebook, "found") == f"({files}, 0)"


def test_holes_of_files_in_shared_memory_stay_holes(notebook: Notebook) -> None:
    """More than the machine has memory for, of which next to nothing is used."""
    notebook.run("""
        import os
        file = open("/dev/shm/large", "w+b", buffering=0)
        os.pwrite(file.fileno(), b"first", 0); os.pwrite(file.fileno(), b"last", 1 << 40)
    """)
    look = "os.pread(file.fileno(), 5, 0), os.pread(file.fileno(), 9, 1 << 40), os.stat(file.name).st_blocks < 1000"
    save(notebook)
    notebook.run("file.truncate(0)")
    restore(notebook)
    assert value(notebook, look) == "(b'first', b'last', True)"


def test_pipes_with_data_in_them(notebook: Notebook) -> None:
    notebook.run("""
        import os, socket
        r, w = os.pipe(); os.write(w, b"in the pipe")
        a, b = socket.socketpair(); a.sendall(b"in the socket")
    """)
    save(notebook)
    assert value(notebook, "os.read(r, 100), b.recv(100)") == "(b'in the pipe', b'in the socket')"
    notebook.run("os.close(r); os.close(w); a.close(); b.close()")
    restore(notebook)
    assert value(notebook, "os.read(r, 100), b.recv(100)") == "(b'in the pipe', b'in the socket')"
    notebook.run("os.write(w, b'more'); b.sendall(b'back')")
    assert value(notebook, "os.read(r, 100), a.recv(100)") == "(b'more', b'back')"


def test_descriptors_that_are_no_files(notebook: Notebook) -> None:
    """Memory files, event counters and an epoll that watches: what event loops and libraries are made of."""
    notebook.run("""
        import ctypes, os, select, signal, struct
        memory = os.memfd_create("mine"); os.write(memory, b"in memory")
        counter = os.eventfd(7) if hasattr(os, "eventfd") else ctypes.CDLL(None).eventfd(7, 0)
        timer = ctypes.CDLL(None).timerfd_create(1, 0)
        spec = struct.pack("qqqq", 0, 0, 1000, 0)
        ctypes.CDLL(None).timerfd_settime(timer, 0, spec, None)
        mask = struct.pack("Q128x", 1 << (signal.SIGUSR2 - 1))
        signals = ctypes.CDLL(None).signalfd(-1, mask, 0)
        watch = select.epoll(); watch.register(counter, select.EPOLLIN)
        semaphore = ctypes.CDLL(None).eventfd(3, 1)  # EFD_SEMAPHORE
        take = lambda: struct.unpack("Q", os.read(semaphore, 8))[0]
        due = ctypes.CDLL(None).timerfd_create(1, 0)  # every 10 ms, and not read before the save
        ctypes.CDLL(None).timerfd_settime(due, 0, struct.pack("qqqq", 0, 10**7, 0, 10**7), None)
        select.select([due], [], [])
        ticks = lambda: [select.select([due], [], [], 60)[0] and os.read(due, 8) and "tick" for _ in range(3)]
        everything = memory, counter, timer, signals, watch.fileno(), semaphore, due
        look = lambda: (os.pread(memory, 100, 0), struct.unpack("Q", os.read(counter, 8))[0])
    """)
    polled = "watch.poll(0) == [(counter, select.EPOLLIN)]"
    assert value(notebook, "min(everything) >= 0") == "True"
    save(notebook)
    assert value(notebook, polled) == "True"
    assert value(notebook, "look()") == "(b'in memory', 7)"
    notebook.run("os.ftruncate(memory, 0); [os.close(fd) for fd in everything]")
    restore(notebook)
    assert value(notebook, polled) == "True"
    assert value(notebook, "look()") == "(b'in memory', 7)"
    assert value(notebook, "[take(), take(), take()]") == "[1, 1, 1]"
    assert value(notebook, "ticks()") == "['tick', 'tick', 'tick']"
    assert value(notebook, "[os.readlink(f'/proc/self/fd/{fd}') for fd in (timer, signals)]") == (
        "['anon_inode:[timerfd]', 'anon_inode:[signalfd]']"
    )


def test_files_of_proc_about_a_thread(notebook: Notebook) -> None:
    """Of one that runs, and of one that has ended: chDB has such a file open for each of its threads."""
    notebook.run("""
        import os, threading
        opened, done = {}, threading.Event()
        def work(name):
            os.write(own := os.open("/proc/thread-self/comm", os.O_RDWR), name.encode()); os.close(own)
            opened[name] = open("/proc/thread-self/comm", "rb"), os.open("/proc/thread-self", os.O_RDONLY)
            opened[name][0].read(3)
        ended = threading.Thread(target=work, args=["ended"]); ended.start(); ended.join()
        running = threading.Thread(target=lambda: [work("running"), done.wait()]); running.start()
        while "running" not in opened: pass
        comm, folder = opened["running"]
        flags = lambda: [os.get_inheritable(fd) for fd in (comm.fileno(), folder)]
        os.set_inheritable(folder, True)
    """)
    look = "os.pread(comm.fileno(), 99, 0), comm.tell(), 'stat' in os.listdir(folder), flags()"
    before = value(notebook, look)
    save(notebook)
    notebook.run("comm.close(); os.close(folder)")
    for how in ("", " --in-place"):
        notebook.run(f"%gpuckpt restore here{how}")
        assert value(notebook, look) == before == "(b'running\\n', 3, True, [False, True])"
    notebook.run("done.set(); running.join()")


def test_descriptors_that_are_on_their_way_and_those_of_processes(notebook: Notebook) -> None:
    """What one process has sent another by a Unix socket and is not received yet; pidfd, as asyncio uses it."""
    notebook.run("""
        import os, signal, socket, subprocess
        here, there = socket.socketpair(); reader, writer = os.pipe(); os.write(writer, b"in the pipe")
        socket.send_fds(here, [b"a pipe"], [reader]); os.close(reader)
        child = subprocess.Popen(["sleep", "1000"]); process = os.pidfd_open(child.pid)
        def receive():
            said, (end,), *_ = socket.recv_fds(there, 100, 1)
            return said, os.read(end, 100)
    """)
    save(notebook)
    assert value(notebook, "receive()") == "(b'a pipe', b'in the pipe')"
    notebook.run("child.kill(); child.wait(); os.close(process)")
    restore(notebook)
    assert value(notebook, "receive()") == "(b'a pipe', b'in the pipe')"
    assert value(notebook, "signal.pidfd_send_signal(process, signal.SIGKILL) or child.wait()") == "-9"


def test_sqlite_in_memory(notebook: Notebook) -> None:
    notebook.run("""
        import sqlite3
        db = sqlite3.connect(":memory:")
        db.execute("create table t (x)"); db.executemany("insert into t values (?)", [(i,) for i in range(1000)])
        db.commit(); db.execute("insert into t values (5)")
    """)
    total = "db.execute('select sum(x) from t').fetchone()[0], db.in_transaction"
    save(notebook)
    assert value(notebook, total) == "(499505, True)"
    notebook.run("db.execute('drop table t'); db.close()")
    restore(notebook)
    assert value(notebook, total) == "(499505, True)"
    notebook.run("db.rollback()")
    assert value(notebook, total) == "(499500, False)"


# -- processes


def test_a_subprocess_in_conversation(notebook: Notebook) -> None:
    notebook.run("""
        import subprocess, sys
        program = "n = 0\\nwhile True:\\n    n += int(input())\\n    print(n, flush=True)"
        child = subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True)
        def add(n):
            child.stdin.write(f"{n}\\n"); child.stdin.flush()
            return child.stdout.readline().strip()
    """)
    assert value(notebook, "add(5)") == "5"
    save(notebook)
    assert value(notebook, "add(1)") == "6"
    pid = notebook.run("child.kill(); child.wait(); print(child.pid)").text
    restore(notebook)
    assert value(notebook, "child.pid, child.poll()") == f"({pid}, None)"
    assert value(notebook, "add(1)") == "6"
    notebook.run("child.stdin.close(); child.wait(60); child.stdout.close()")
    assert notebook.value("child.returncode") == "1"


def test_children_that_have_ended_and_were_not_waited_for(notebook: Notebook) -> None:
    notebook.run("""
        import os, psutil, subprocess
        child = subprocess.Popen(["sh", "-c", "exit 7"])
        if (parent := os.fork()) == 0:
            if os.fork() == 0:  # ends as a child of the kernel's, which nobody waits for
                os.setsid()
            os._exit(0)
        os.waitpid(parent, 0)
        def zombies():
            return sum(child.status() == "zombie" for child in psutil.Process().children())
    """)
    wait_until(lambda: notebook.value("zombies()") == "2")
    for name in ("first", "second"):
        save(notebook, name)
        notebook.run("psutil = None")
        restore(notebook, name)
        assert notebook.value("zombies()") == "2"
    assert notebook.value("child.wait(60)") == "7"


def test_psutil_knows_the_processes_of_before_the_save(notebook: Notebook) -> None:
    """To the system a restored process is a new one: psutil would take it for another with the same id."""
    notebook.run("""
        import psutil, subprocess
        child = psutil.Popen(["sleep", "600"])
        itself = psutil.Process()
    """)
    check = (
        "child.is_running(), child == psutil.Process(child.pid), child.parent() == itself, child in itself.children()"
    )
    for name in ("first", "second"):
        save(notebook, name)
        restore(notebook, name)
        assert notebook.value(check) == "True True True True"
    notebook.run("child.terminate()")
    assert notebook.value("int(child.wait(60))") == "-15"


def test_processes_in_the_background(notebook: Notebook, tmp_path: Path) -> None:
    """``%%script --bg``, a shell's ``&``, and one that made itself a daemon."""
    names = ("script", "shell", "daemon")
    files = {name: tmp_path / name for name in names}
    loops = {name: f"while true; do echo . >> {files[name]}; sleep 0.02; done" for name in names}
    in_shell = f"( {loops['shell']} ) > /dev/null 2>&1 &"
    as_daemon = f"setsid sh -c '{loops['daemon']}' > /dev/null 2>&1 &"
    notebook.run(f"%%script --bg sh\n{loops['script']}")
    notebook.run(f"import os; os.system({in_shell!r}); os.system({as_daemon!r})")

    def written(name: str) -> int:
        return files[name].stat().st_size if files[name].exists() else 0

    def all_go_on() -> bool:
        before = {name: written(name) for name in names}
        return bool(wait_until(lambda: all(written(name) > before[name] for name in names), what=str(before)))

    all_go_on()
    save(notebook)
    assert all_go_on()
    notebook.run("""
        import contextlib, psutil
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        def living():
            found = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += process.status() != "zombie"
            return found
    """)
    wait_until(lambda: value(notebook, "living()") == "0")
    restore(notebook)
    assert all_go_on()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools(notebook: Notebook, method: str) -> None:
    notebook.run(f"""
        import math, multiprocessing, os
        pool = multiprocessing.get_context({method!r}).Pool(2)
        pids = sorted(p.pid for p in pool._pool)
        roots = lambda: pool.map(math.sqrt, [4.0, 9.0, 16.0])
        slow = pool.map_async(math.sqrt, [25.0])
    """)
    assert value(notebook, "roots(), slow.get(60)") == "([2.0, 3.0, 4.0], [5.0])"
    save(notebook)
    assert value(notebook, "roots(), pool.apply_async(math.sqrt, [36.0]).get(60)") == "([2.0, 3.0, 4.0], 6.0)"
    notebook.run("pool.terminate(); pool.join()")
    assert "history.sqlite" not in restore(notebook), "which forked workers have open, and never use"
    assert value(notebook, "roots(), pool.apply_async(math.sqrt, [36.0]).get(60)") == "([2.0, 3.0, 4.0], 6.0)"
    assert value(notebook, "sorted(p.pid for p in pool._pool) == pids") == "True"
    notebook.run("pool.close(); pool.join()")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_pool_executors(notebook: Notebook, method: str) -> None:
    notebook.run(f"""
        import concurrent.futures, math, multiprocessing
        context = multiprocessing.get_context({method!r})
        pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=context)
        roots = lambda: list(pool.map(math.sqrt, [4.0, 9.0, 16.0]))
    """)
    assert value(notebook, "roots()") == "[2.0, 3.0, 4.0]"
    save(notebook)
    assert value(notebook, "roots()") == "[2.0, 3.0, 4.0]"
    notebook.run("pool.shutdown()")
    restore(notebook)
    assert value(notebook, "roots()") == "[2.0, 3.0, 4.0]"
    notebook.run("pool.shutdown()")


def test_queues_locks_and_events_between_processes(notebook: Notebook) -> None:
    notebook.run("""
        import multiprocessing
        fork = multiprocessing.get_context("fork")
        asked, answers, lock, gate = fork.Queue(), fork.Queue(), fork.Lock(), fork.Event()
        number = fork.Value("i", 0)
        def work():
            gate.wait()
            while (n := asked.get()) is not None:
                with lock:
                    number.value += n
                answers.put(number.value)
        worker = fork.Process(target=work); worker.start()
        lock.acquire(); asked.put(3)
    """)
    save(notebook)
    notebook.run("lock.release(); gate.set()")
    assert value(notebook, "answers.get(timeout=60), number.value") == "(3, 3)"
    notebook.run("worker.kill(); worker.join()")
    restore(notebook)
    assert value(notebook, "worker.is_alive(), number.value, gate.is_set()") == "(True, 0, False)"
    notebook.run("lock.release(); gate.set()")
    assert value(notebook, "answers.get(timeout=60), number.value") == "(3, 3)"
    notebook.run("asked.put(None); worker.join(60)")
    assert value(notebook, "worker.exitcode") == "0"


# -- the network


SERVER = """
    import http.server, threading
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers(); self.wfile.write(f"{name}: {self.path}".encode())
        def log_message(self, *_):
            pass
    name = "saved"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True); thread.start()
"""


def page(port: str | int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/page", timeout=60) as answer:
        return str(answer.read().decode())


def test_listening_sockets(notebook: Notebook) -> None:
    notebook.run(SERVER)
    port = value(notebook, "server.server_port")
    assert page(port) == "saved: /page"
    save(notebook)
    assert page(port) == "saved: /page"
    notebook.run("server.shutdown(); server.server_close()")
    with pytest.raises(OSError, match="refused"):
        page(port)
    restore(notebook)
    assert page(port) == "saved: /page"
    notebook.run("server.shutdown()")


def test_a_listening_socket_whose_port_was_taken_gets_a_free_one(start: StartKernel) -> None:
    first = start()
    first.run(SERVER)
    port = value(first, "server.server_port")
    save(first)
    first.run("name = 'the first'")
    copy = start()
    restore(copy)
    # The first kernel still has the port.
    other = value(copy, "server.socket.getsockname()[1]")
    assert other != port
    assert page(port) == "the first: /page"
    assert page(other) == "saved: /page"


def test_connections_come_back_closed(notebook: Notebook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        notebook.run(f"""
            import socket
            connection = socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 10)
        """)
        mine, _ = server.accept()
        with mine:
            save(notebook)
            notebook.run("connection.sendall(b'still connected')")
            assert mine.recv(100) == b"still connected"
            restore(notebook)
            assert notebook.fails("connection.sendall(b'x'); connection.recv(1) or 1/0").ename
            notebook.run(f"again = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 10)")


def test_a_connection_that_nobody_has_accepted_yet_is_no_obstacle(notebook: Notebook) -> None:
    """A client of the kernel itself may be connecting in the instant of a save."""
    notebook.run("""
        import socket
        server = socket.create_server(("127.0.0.1", 0))
    """)
    port = int(value(notebook, "server.getsockname()[1]"))
    with socket.create_connection(("127.0.0.1", port)):
        save(notebook)
        notebook.run("server.accept()[0].close()")
    restore(notebook)
    with socket.create_connection(("127.0.0.1", port)) as again:
        notebook.run("server.accept()[0].sendall(b'again')")
        assert again.recv(100) == b"again"


# -- the notebook


def test_widgets_answer_the_browser(notebook: Notebook) -> None:
    notebook.run("""
        import ipywidgets
        seen = []
        slider = ipywidgets.IntSlider(value=3); slider.observe(lambda change: seen.append(change.new), "value")
    """)
    comm_id = value(notebook, "slider.model_id")

    def move(value: int) -> None:
        content = {
            "comm_id": comm_id,
            "data": {"method": "update", "state": {"value": value}, "buffer_paths": []},
        }
        notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))

    save(notebook)
    move(5)
    assert value(notebook, "slider.value, seen") == "(5, [5])"
    notebook.run("slider.close(); del slider")
    restore(notebook)
    assert value(notebook, "slider.value, seen") == "(3, [])"
    move(7)
    assert value(notebook, "slider.value, seen") == "(7, [7])"


def test_pages_are_told_how_widgets_are_in_a_restored_kernel(notebook: Notebook) -> None:
    notebook.run("import ipywidgets; output, slider = ipywidgets.Output(), ipywidgets.IntSlider(value=3)")
    slider, output = value(notebook, "slider.model_id"), value(notebook, "output.model_id")
    save(notebook)
    notebook.run("slider.value = 5")
    restoring = Asked(notebook, "%gpuckpt restore here")
    told: dict[str, dict[str, object]] = {}
    while slider not in told:
        message = notebook.client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "comm_msg" and message["content"]["data"]["method"] == "update":
            told[message["content"]["comm_id"]] = message["content"]["data"]["state"]
    assert restoring.answer()["status"] == "ok"
    assert told[slider]["value"] == 3
    assert output not in told, "what pages have put there may be in no snapshot"


def rows() -> list[tuple[int, int, str]]:
    """What all kernels of this test have written into IPython's history."""
    with contextlib.closing(sqlite3.connect(history_file())) as db:
        return list(db.execute("select session, line, source_raw from history order by session, line"))


def history_file() -> Path:
    return Path(os.environ["IPYTHONDIR"], "profile_default", "history.sqlite")


def test_the_history_of_cells_goes_on_in_a_session_of_its_own(start: StartKernel) -> None:
    first = start()
    first.run("'before the save'")
    session = int(value(first, "get_ipython().history_manager.session_number"))
    save(first)
    first.run("'after the save'")
    copy = start()
    restore(copy)
    shown = []
    for i in range(3):
        shown += [first.run(f"'in the first, {i}'").text, copy.run(f"'in the copy, {i}'").text]
    restored = int(value(copy, "get_ipython().history_manager.session_number"))
    assert restored not in (session, int(value(first, "get_ipython().history_manager.session_number")))
    assert value(copy, "In[1]") == "'before the save'"
    wanted = ["'before the save'", "'after the save'"]
    wanted += [f"'in the {which}, {i}'" for which in ("first", "copy") for i in range(3)]
    wait_until(lambda: set(wanted) <= {source for _, _, source in rows()}, what=str(wanted))
    assert {number for number, _, source in rows() if "in the copy" in source} == {restored}
    assert {number for number, _, source in rows() if "in the first" in source} == {session}
    for notebook in (first, copy):
        assert "not unique" not in "".join(shown) + logged(notebook)


def test_a_cell_that_begins_during_a_save_leaves_no_thread_of_its_history_behind(start: StartKernel) -> None:
    """IPython begins another one for it, while the kernel's own has ended."""
    notebook = start()
    notebook.run("housekeeping = get_ipython().kernel.agent.housekeeping; housekeeping._close_history()")
    notebook.run("'a cell'; housekeeping._open_history(new_session=False)")
    threads = "[thread.name for thread in __import__('threading').enumerate()]"
    assert value(notebook, f"{threads}.count('IPythonHistorySavingThread')") == "1"
    wait_until(lambda: "'a cell'" in str(rows()))


def logged(notebook: Notebook) -> str:
    """What the kernel wrote on its standard output past the notebook."""
    return "".join(path.read_text() for path in notebook.folder.glob("run-*/kernel.log"))


# -- saved from outside, in the middle of a cell


def messages(notebook: Notebook, request: str) -> list[dict[str, Any]]:
    """Everything that was published for a request, up to its idle."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["content"].get("execution_state") != "idle":
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request:
            found.append(message)
    return found


def printed(found: list[dict[str, Any]]) -> str:
    return "".join(m["content"]["text"] for m in found if m["msg_type"] == "stream")


def test_the_loop_of_a_toolkit_goes_on_and_the_kernel_answers(notebook: Notebook) -> None:
    """Between cells such a loop (`%gui qt`, `%matplotlib tk`) has the main thread, also when the kernel is saved."""
    notebook.run("""
        import select, zmq
        from ipykernel.eventloops import get_shell_stream, register_integration
        turns = 0
        @register_integration("made_up")
        def loop(kernel):  # as Qt's and Tk's do it
            global turns
            turns += 1
            if kernel.io_loop.asyncio_loop._ready or kernel._main_asyncio_lock.locked():
                return  # ipykernel has begun with a request, and would not go on while this loop waits for the next
            stream = get_shell_stream(kernel)
            # What arrives while `flush` looks whether there is more wakes nobody who waits for the descriptor: pyzmq
            # leaves it to the event loop.
            while not stream.flush(limit=1) and not kernel.io_loop.asyncio_loop._ready:
                select.select([stream.getsockopt(zmq.FD)], [], [])
    """)
    notebook.run("%gui made_up")
    notebook.run("state = 'saved'")
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "between"})
    notebook.run("state = 'later'")
    restore(notebook, "between")
    assert value(notebook, "state") == "saved"
    with notebook.keeper as keeper:
        keeper.request("hibernate")
    assert grows(notebook, "turns")
    assert value(notebook, "state") == "saved"


def test_a_cell_that_was_saved_while_it_looped_runs_on_in_the_cell_that_restores(
    notebook: Notebook, tmp_path: Path
) -> None:
    gate = tmp_path / "go on"
    looping = notebook.client.execute(f"""
        import os, time
        print("looping", flush=True)
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.005)
        done = "the rest of the cell"
        print(done)
    """)
    notebook.until_printed("looping")
    with notebook.keeper as keeper:
        saved = keeper.request("save", {"name": "looping"}, timeout=60)
    assert saved["name"] == "looping"
    # The live cell was not harmed, and ends as it would have.
    gate.touch()
    assert notebook.reply()["parent_header"]["msg_id"] == looping
    assert printed(messages(notebook, looping)) == "the rest of the cell\n"
    notebook.run("done = None")
    gate.unlink()
    asked = notebook.client.execute("%gpuckpt restore looping")
    until_displayed(notebook, "Restored looping")
    gate.touch()
    reply = notebook.reply()
    assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (asked, "ok")
    assert printed(messages(notebook, asked)) == "the rest of the cell\n"
    assert value(notebook, "done") == "the rest of the cell"


def until_displayed(notebook: Notebook, text: str) -> None:
    while True:
        message = notebook.client.get_iopub_msg(timeout=60)
        if "data" in message["content"] and text in json.dumps(message["content"]["data"]):
            return


def test_a_cell_that_was_saved_while_it_waited_for_input_asks_again(notebook: Notebook) -> None:
    asking = notebook.client.execute("name = input('Who? '); print('Hello', name)", allow_stdin=True)
    assert notebook.client.get_stdin_msg(timeout=60)["content"]["prompt"] == "Who? "
    with notebook.keeper as keeper:
        keeper.request("save", {"name": "asking"}, timeout=60)
    notebook.client.input("the first")
    assert notebook.reply()["parent_header"]["msg_id"] == asking
    assert printed(messages(notebook, asking)) == "Hello the first\n"
    prompts, shown = [], []

    def answer(message: dict[str, Any]) -> None:
        prompts.append(message["content"]["prompt"])
        notebook.client.input("the second")

    reply = notebook.client.execute_interactive(
        "%gpuckpt restore asking", stdin_hook=answer, output_hook=shown.append, timeout=60
    )
    assert (reply["content"]["status"], prompts) == ("ok", ["Who? "])
    assert printed(shown) == "Hello the second\n"
    assert notebook.value("name") == "the second"
