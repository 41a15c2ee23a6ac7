# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: our FastAPI application around vLLM's engine and vLLM's OpenAI routes."""


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; `argv` without the program name (None: this process's arguments).

    Returns the exit status: 0 after a drain, 1 when the engine died or could not be started as
    asked, 2 for arguments that do not parse.
    """
    from mla_serving.server.run import serve  # vLLM takes seconds to import

    return serve(argv)


__all__ = ["main"]
