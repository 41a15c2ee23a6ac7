# SPDX-License-Identifier: Apache-2.0
"""Where a request goes, as middleware sees it."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path that routes are matched against: without the --root-path of a proxy."""
    path: str = scope["path"]
    root = scope.get("root_path", "").rstrip("/")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path
