# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server, which also knows the load format of telling.py.

Its engine is another process, which Python starts by a fork or by importing this file again: so the
format is registered on import.
"""

import runpy

from telling import register_weights

register_weights(deep=True)

if __name__ == "__main__":
    # Leaves sys.modules["__main__"] as it is: that is what a new process imports.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
