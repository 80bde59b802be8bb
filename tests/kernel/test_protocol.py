"""Jupyter's own tests of a kernel, against ours: freshly started, and just restored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jupyter_kernel_test
import pytest
from notebooks import PATIENCE


@pytest.fixture(autouse=True, scope="class")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """These kernels live as long as their class does, longer than the folders of one test."""
    root: Path = tmp_path_factory.mktemp("protocol")
    os.environ["JUPYTER_RUNTIME_DIR"] = str(root / "runtime")
    os.environ["GPUCKPT_STORE"] = str(root / "store")
    os.environ["GPUCKPT_KEYS"] = str(root / "keys")
    os.environ["GPUCKPT_LOGS"] = str(root / "logs")
    os.environ["IPYTHONDIR"] = str(root / "ipython")


@pytest.fixture(autouse=True)
def folders() -> None:
    """Use the class's."""


class Promises(jupyter_kernel_test.KernelTests):  # type: ignore[misc]
    __test__ = False
    kernel_name = "python3-gpuckpt"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('hello')", "x = 1")
    incomplete_code_samples = ("print('''hello", "def f():")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise ValueError"
    code_execute_result = (
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    )
    code_display_data = (
        {"code": "from IPython.display import HTML, display; display(HTML('<b>x</b>'))", "mime": "text/html"},
    )
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    def execute_helper(self, *args: Any, **kwargs: Any) -> Any:
        """Let it see what comes of this request alone, as clients do, and wait for it where the processors are busy.

        By itself it waits a tenth of a second, and takes what an earlier request ends with for its own.
        """
        asked: list[str] = []
        execute, iopub = self.kc.execute, self.kc.iopub_channel
        get_msg = iopub.get_msg

        def execute_and_note(**how: Any) -> str:
            asked.append(execute(**how))
            return asked[-1]

        def next_of_this_request(timeout: float) -> dict[str, Any]:
            while True:
                message: dict[str, Any] = get_msg(timeout=PATIENCE)
                if message["parent_header"].get("msg_id") == asked[-1]:
                    return message

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.kc, "execute", execute_and_note)
            patch.setattr(iopub, "get_msg", next_of_this_request)
            return super().execute_helper(*args, **kwargs)


class TestAFreshKernel(Promises):
    __test__ = True


class TestARestoredKernel(Promises):
    __test__ = True

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        for line in ("%gpuckpt save here", "%gpuckpt restore here"):
            reply = cls.kc.execute_interactive(line, timeout=60, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok"
