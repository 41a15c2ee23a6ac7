# SPDX-License-Identifier: Apache-2.0
"""--middleware, which vLLM would have around its own routes alone."""

import importlib
import inspect
from collections.abc import Iterable

from fastapi import FastAPI


def add(app: FastAPI, paths: Iterable[str]) -> None:
    """Have what `paths` say to import around `app`, as in vLLM: a class of ASGI middleware, or a
    coroutine function of a request and of what answers it."""
    for path in paths:
        module, name = path.rsplit(".", 1)
        found = getattr(importlib.import_module(module), name)
        if inspect.isclass(found):
            app.add_middleware(found)  # type: ignore[arg-type]
        elif inspect.iscoroutinefunction(found):
            app.middleware("http")(found)
        else:
            raise ValueError(f"--middleware {path}: expected a class or a coroutine function")
