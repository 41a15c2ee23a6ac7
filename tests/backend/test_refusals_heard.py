# SPDX-License-Identifier: Apache-2.0
"""The words of a refusal, or of a failed start, reach the server that listens."""

import re
import subprocess
import sys

from layer_config import selector_config


def test_a_refusal_reaches_the_server_that_listens():
    from mla_backend.attention.backend import MlaBackend
    from mla_backend.refusals import RefusalError, heard

    script = "from mla_backend.refusals import RefusalError as E; E('no, mend it')"
    with heard() as refused:
        assert refused() == ""
        subprocess.run([sys.executable, "-c", script], check=True)  # a worker
        assert refused() == "no, mend it"
        MlaBackend.validate_configuration(
            device_capability=None, **selector_config(head_size=512)._asdict()
        )
        assert refused().startswith("CUSTOM cannot serve this: cache row of 512 elements")
    RefusalError("nobody listens")


def test_a_failed_start_reaches_the_server_that_listens():
    """Of a worker, not of the engine above it, which only says that there was one."""
    from mla_backend.refusals import RefusalError, heard

    script = """if True:
        import logging
        from mla_backend.plugin import register
        def failed(error, words):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.v1").exception(words)
        register()
        register()
        failed(KeyError("x"), "WorkerProc failed.")
        failed(KeyError("x"), ValueError("an exception for words"))
        failed(OSError("no weights"), "WorkerProc failed to start.")
        failed(RuntimeError("see above"), "EngineCore failed to start.")
    """
    with heard() as refused:
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        assert refused() == "OSError: no weights"
        RefusalError("no, mend it")
        assert refused() == "no, mend it"
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        assert refused() == "no, mend it"


def test_a_start_that_fails_without_words_says_where():
    """In a worker, as in the server's own process."""
    from mla_backend.refusals import heard

    script = """if True:
        import logging
        from mla_backend.plugin import register
        register()
        register()  # importing vLLM, as the first one does here, may set up its logging anew
        try:
            {fails}
        except Exception:
            logging.getLogger("vllm.v1").exception("WorkerProc failed to start.")
    """
    for fails, said in (
        (
            "exec(compile('raise AssertionError', 'x.py', 'exec'))",
            "AssertionError, in x.py, line 1",
        ),
        ("exec(compile('1 % 0', 'x.py', 'exec'))", "ZeroDivisionError: .*, in x.py, line 1"),
        ("raise OSError('no weights')", "OSError: no weights$"),
    ):
        with heard() as refused:
            command = [sys.executable, "-c", script.format(fails=fails)]
            subprocess.run(command, check=True, capture_output=True)
            assert re.match(said, refused()), refused()
