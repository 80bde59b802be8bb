"""What a panel says in a restored kernel, whose threads go on from the save; see tests/lab/test_panel.py, too."""

from __future__ import annotations

from notebooks import Notebook, wait_until

_PANEL = """
    import threading, time
    import jupyter_gpuckpt
    %gpuckpt panel
    panel = next(iter(get_ipython().kernel.agent.panels.values()))
    keeper = panel._agent.keeper
    restored = False

    @jupyter_gpuckpt.after_restore
    def note_it(resumed):
        global restored
        restored = resumed.restored

    def late(function):
        "Have it return in a restored kernel only when the panel says that it is one."
        def waits(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            finally:
                while restored and not panel.state.get("note", "").startswith("Restored"):
                    time.sleep(0.01)
        return waits
"""


def _press(notebook: Notebook, what: str, **args: str) -> None:
    data = {"method": "custom", "content": {"do": what, "args": args, "number": "1"}}
    content = {"comm_id": notebook.value("panel.model_id"), "data": data}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", content))


def test_a_save_that_goes_on_in_the_restored_kernel_says_what_the_panel_says(notebook: Notebook) -> None:
    notebook.run(_PANEL)
    notebook.run("keeper.take = late(keeper.take)")
    _press(notebook, "save", name="one")
    wait_until(lambda: "Saved one" in notebook.look("panel.state['note']"))
    notebook.run("%gpuckpt restore one")
    wait_until(lambda: notebook.look("panel._acting.locked(), panel.state['operation']") == "(False, None)")
    assert notebook.value("panel.state['note'], panel.state['error']") == "Restored one. None"


def test_what_was_looked_at_during_a_save_fails_nowhere_in_the_restored_kernel(notebook: Notebook) -> None:
    notebook.run(_PANEL)
    notebook.run("""
        hears = keeper.hear
        def hear(number, news):
            "Let the answer be on its way until the kernel is a restored one."
            if restored or keeper._waiting[number].op != "status":
                hears(number, news)
        keeper.hear, keeper.request = hear, late(keeper.request)
        looking = threading.Thread(target=panel.look)
        looking.start()
    """)
    notebook.run("%gpuckpt save one")
    notebook.run("%gpuckpt restore one")
    notebook.run("looking.join()")
    assert notebook.value("panel.state['note'], panel.state['error']") == "Restored one. None"


def test_a_failure_to_look_is_shown_until_the_next_look(notebook: Notebook) -> None:
    notebook.run(_PANEL)
    notebook.run("""
        from jupyter_gpuckpt.errors import GpuckptError
        asks = keeper.request
        def fails(*args, **kwargs):
            raise GpuckptError("No answer.")
        keeper.request = fails
        panel.look()
        keeper.request = asks
    """)
    assert notebook.value("panel.state['error']['what']") == "No answer."
    notebook.run("panel.look()")
    assert notebook.value("panel.state['error']") == "None"
