# SPDX-License-Identifier: Apache-2.0
r"""Refuse JSON with values that vLLM answers with 500, or with words on its own code: half of a
surrogate pair, such as "\ud800", which is no Unicode text and can be neither tokenised nor sent on,
integers that it cannot pass on to its engine, and a field that it reads before it is checked. Also
JSON that nests too deep, which ends its engine.
"""

import json
import re
from collections import deque
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mla_serving.server.errors import error_response
from mla_serving.server.json_depth import MOST, is_too_deep
from mla_serving.server.json_object import is_json
from mla_serving.server.replay import replay

# What may become half a pair: an escape of one (whole pairs too), its bytes, or a zero byte, as in
# UTF-16: Python's parser takes all of them. Then what may be one of the fields, and an escape of a
# letter or _, which may be in the name of one. A body without any is not parsed here.
_SUSPECT = re.compile(
    rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00"
    rb'|"(?:top_k|stream_interval|max_pattern_size|min_pattern_size|min_count)"\s*:\s*(?:"|\d{20})'
    rb'|"structured_outputs"\s*:\s*[^\s{n]'
    rb'|"tool_choice"\s*:\s*\{'
    rb'|"messages"\s*:\s*[^\s\[]'
    rb'|"content"\s*:\s*\[\s*\]'
    rb'|"type"\s*:\s*"refusal"'
    rb"|\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])"
)
_UNBOUNDED = ("top_k", "stream_interval")
_REPETITION = ("max_pattern_size", "min_pattern_size", "min_count")
_MOST = 2**64 - 1  # what vLLM can pass on to its engine
_HALF = re.compile("[\ud800-\udfff]")
_LONGEST_PATH = 200  # of the field's name in an answer
_OTHER_PROMPTS = {"prompt", "input"}
_ASSISTANT = ("message", "assistant")
_HOLDS_TEXT = (str, list, dict)


class JsonValues:
    """ASGI middleware: 400 for application/json with a value that vLLM cannot take."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_json(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        messages = deque([await receive()])
        while messages[-1].get("more_body"):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        if (found := complaint(body)) is not None:
            field, text = found
            return await error_response(400, text, param=field or None)(scope, receive, send)
        await self.app(scope, replay(messages, receive), send)


def complaint(body: bytes) -> tuple[str, str] | None:
    """The place in JSON of a value to refuse ("messages[0].content"; "" for a name at the top), and
    what is wrong with it; None without one, and for what is no JSON."""
    if is_too_deep(body):
        return "", f"The body nests deeper than {MOST} objects and lists."
    if not _SUSPECT.search(body):
        return None
    try:
        content = json.loads(body)
    except ValueError:  # vLLM's to refuse
        return None
    return _lone_surrogate(content) or _odd_field(content)


def _lone_surrogate(content: Any) -> tuple[str, str] | None:
    """In memory and time that the body bounds: paths are cut, and numbers have none."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        path, value = left.pop()
        if isinstance(value, str) and (half := _HALF.search(value)):
            path = _ascii(path)[:_LONGEST_PATH]
            return path, (
                f"{path or 'The body'} has a lone surrogate, {_ascii(half[0])}: half of a pair, "
                "which is no character. Send both halves, or leave it out."
            )
        if isinstance(value, list):
            left += [
                (f"{path}[{i}]"[:_LONGEST_PATH], item)
                for i, item in enumerate(value)
                if isinstance(item, _HOLDS_TEXT)
            ]
        if isinstance(value, dict):
            left += [(path, name) for name in value]
            left += [
                (f"{path}.{name[:_LONGEST_PATH]}".lstrip(".")[:_LONGEST_PATH], item)
                for name, item in value.items()
                if isinstance(item, _HOLDS_TEXT)
            ]
    return None


def _odd_field(content: dict[str, Any]) -> tuple[str, str] | None:
    repetition, outputs = content.get("repetition_detection"), content.get("structured_outputs")
    values = {name: content.get(name) for name in _UNBOUNDED}
    if isinstance(repetition, dict):
        values |= {f"repetition_detection.{name}": repetition.get(name) for name in _REPETITION}
    for field, value in values.items():
        if (number := _integer(value)) > _MOST:
            return field, f"{field} must be at most {_MOST}, got {number}."
    if not isinstance(outputs, dict | None):
        return "structured_outputs", "structured_outputs must be a JSON object."
    # Beside another prompt, of routes that are not chat's, it is passed over.
    if not (_OTHER_PROMPTS & content.keys() or isinstance(content.get("messages", []), list)):
        return "messages", "messages must be a list."
    return _wordless_message(content.get("input")) or _nameless_tool(
        content.get("tools"), content.get("tool_choice")
    )


def _wordless_message(items: Any) -> tuple[str, str] | None:
    """vLLM reads the text of the first part of an assistant's message, of responses alone."""
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and (item.get("type"), item.get("role")) == _ASSISTANT:
            parts = item.get("content")
            if parts == []:
                return f"input[{i}].content", f"input[{i}].content is empty; send text."
            first = parts[0] if isinstance(parts, list) else None
            if isinstance(first, dict) and first.get("type") == "refusal":
                place = f"input[{i}].content[0]"
                return place, f"{place} is a refusal; send its text as output_text."
    return None


def _nameless_tool(tools: Any, choice: Any) -> tuple[str, str] | None:
    """Where a choice names a function, as only chat's does, vLLM looks for it in every tool."""
    if not isinstance(tools, list) or not isinstance(choice, dict) or "function" not in choice:
        return None
    for i, tool in enumerate(tools):
        function = tool.get("function", {}) if isinstance(tool, dict) else None
        if isinstance(function, dict) and "name" not in function:
            return f"tools[{i}].function.name", f"tools[{i}].function.name is missing."
    return None


def _integer(value: Any) -> int:
    """As vLLM reads it, from a string too, "5.0" among them; 0 for what is none."""
    text = value.partition(".")[0] if isinstance(value, str) else value
    try:
        return int(text) if isinstance(text, (int, str)) else 0
    except ValueError:
        return 0


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
