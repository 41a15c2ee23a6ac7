# SPDX-License-Identifier: Apache-2.0
"""What vLLM would answer with 500 is refused before it sees it; the rest arrives unchanged."""

import json
import time
import tracemalloc

import pytest
from mla_serving.server.json_depth import MOST
from mla_serving.server.json_values import complaint

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (rb'{"stop": "\ud800"}', "stop"),
        (rb'{"stop": ["a", "x\uDFFFy"]}', "stop[1]"),
        (rb'{"prompt": ["\ud83d \ude00"]}', "prompt[0]"),  # both halves, but not side by side
        (rb'{"prompt": "\ude00\ud83d"}', "prompt"),  # in the wrong order
        (b'{"prompt": "\xed\xa0\x80"}', "prompt"),  # its bytes
        (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages[0].content"),
        (rb'{"messages": [{"content": [{"text": "\ud800"}]}]}', "messages[0].content[0].text"),
        (rb'{"model": "m", "user": "\ud800"}', "user"),
        (rb'{"logit_bias": {"\ud800": 1}}', "logit_bias"),
        (rb'{"\ud800": 1}', None),
        (rb'{"\ud800": {"a": "\ud801"}}', r"\ud800.a"),
        (r'{"stop": "\ud800"}'.encode("utf-16-le"), "stop"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_lone_surrogate(stand, openai_error, body, field, whole):
    s = stand()

    async def pieces():
        for i in range(len(body)):
            yield body[i : i + 1]

    content = body if whole else pieces()
    error = openai_error(s.request("POST", "/v1/echo", content=content, headers=JSON))
    assert (error["code"], error["param"]) == (400, field)
    assert f"{field or 'The body'} has a lone surrogate, \\ud" in error["message"]
    assert s.events == []


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\ud7ff\ue000", r"\ud800", "\\\U0001f600", "\x00", "日本"]
)
@pytest.mark.parametrize("escaped", [True, False])
def test_whole_text_arrives_unchanged(stand, text, escaped):
    body = json.dumps({"prompt": text, text: [text]}, ensure_ascii=escaped).encode()
    answer = stand().request("POST", "/v1/echo", content=body, headers=JSON)
    assert answer.json() == {"bytes": len(body), "sum": sum(body)}


@pytest.mark.parametrize(
    "body",
    [
        rb'{"a": "\ud800"',
        rb'{"a": "\ud800\x"}',
        b'{"\xed\xa0": \xff}',
    ],
)
def test_what_is_no_json_is_vllms_to_refuse(stand, body):
    answer = stand().request("POST", "/v1/echo", content=body, headers=JSON)
    assert answer.json()["bytes"] == len(body)


def nested(depth, begin=b'{"a": ', end=b"}"):
    """JSON that is a number in so many objects, or lists."""
    return begin * depth + b"1" + end * depth


LISTS = (b"[", b"]")


TOO_DEEP = {
    "as ended the engine": b'{"model": "m", "kv_transfer_params": %s}' % nested(500),
    "lists": b'{"model": "m", "kv_transfer_params": {"a": %s}}' % nested(500, *LISTS),
    "one more": nested(MOST + 1),
    "behind a string": b'{"a": "]]]", "b": %s}' % nested(MOST, *LISTS),
    "behind escapes": rb'{"a": "\\\"]]]", "b": "\\", "c\"": %s, "d": "["}' % nested(MOST, *LISTS),
    "behind many": b'{"a": [%s[]], "b": %s}' % (b"[[]], " * 500, nested(MOST, *LISTS)),
    "UTF-16": f'{{"\u2200": {nested(MOST).decode()}}}'.encode("utf-16-le"),  # has a byte '"'
    "over what Python parses": nested(100_000),
    "and a surrogate": rb'{"a": ' + b"[" * 100_000 + rb'"\ud800"' + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("case", TOO_DEEP)
def test_json_that_nests_too_deep(stand, openai_error, case):
    s = stand()
    error = openai_error(s.request("POST", "/v1/echo", content=TOO_DEEP[case], headers=JSON))
    assert error["code"] == 400
    assert error["message"] == f"The body nests deeper than {MOST} objects and lists."
    assert s.events == []


NOT_TOO_DEEP = {
    "transfer parameters": b'{"model": "m", "kv_transfer_params": %s}' % nested(100),
    "the most": nested(MOST),
    "the most of both": nested(MOST // 2, b'{"a": [', b"]}"),
    "many": b'{"prompt": [%s[5]]}' % (b"[5], " * 1000),
    "text": b'{"prompt": "%s"}' % (b"{[" * 1000),
    "escapes": rb'{"a": "\\\"%s", "%s\\": "%s"}' % (b"{" * 500, b"[" * 500, b"{" * 500),
    "UTF-16": f'{{"a": "\u2200{"[" * 500}"}}'.encode("utf-16-le"),
    "half a character": nested(500).decode().encode("utf-16-le")[:-1],  # vLLM's to refuse
}


@pytest.mark.parametrize("case", NOT_TOO_DEEP)
def test_json_that_does_not_nest_too_deep_arrives(stand, case):
    body = NOT_TOO_DEEP[case]
    answer = stand().request("POST", "/v1/echo", content=body, headers=JSON)
    assert answer.json()["bytes"] == len(body)


def test_many_small_lists_hold_no_other_request_up():
    """8 MiB of them: to parse them would take seconds."""
    body = b'{"prompt": [' + b"[], " * (2 * 2**20) + b"[]]}"
    began = time.process_time()
    assert complaint(body) is None
    assert time.process_time() - began < 1


def test_other_bodies_are_none_of_its_business(stand):
    body = rb'{"a": "\ud800"}'
    for headers in ({}, {"content-type": "text/plain"}):
        answer = stand().request("POST", "/v1/echo", content=body, headers=headers)
        assert answer.json()["bytes"] == len(body)


def test_a_name_without_end_is_cut():
    path, text = complaint(json.dumps({"n" * 10_000: "\ud800"}).encode())
    assert len(path) == 200 and r"\ud800" in text


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b'{"top_k": 18446744073709551616}', "top_k", "at most 18446744073709551615"),
        (b'{"a": {}, "top_k":\n1%s, "b": 1}' % (b"0" * 30), "top_k", "got 1000000"),
        (b'{"top_k": "18446744073709551616"}', "top_k", "got 18446744073709551616"),
        (b'{"top_k": " +1_8446744073709551616"}', "top_k", "got 18446744073709551616"),
        (b'{"top_k": "18446744073709551616.0"}', "top_k", "got 18446744073709551616"),
        (rb'{"top_k": "\n18446744073709551616"}', "top_k", "got 18446744073709551616"),
        (rb'{"top_k": "\u00318446744073709551616"}', "top_k", "got 18446744073709551616"),
        (rb'{"top\u005fk": 18446744073709551616}', "top_k", "at most 18446744073709551615"),
        (rb'{"\u0074op_k": 18446744073709551616}', "top_k", "at most 18446744073709551615"),
        (b'{"stream_interval": 18446744073709551616}', "stream_interval", "at most 1844674407"),
        *(
            (
                b'{"repetition_detection": {"%s": 18446744073709551616}}' % name,
                f"repetition_detection.{name.decode()}",
                "at most 18446744073709551615",
            )
            for name in (b"max_pattern_size", b"min_pattern_size", b"min_count")
        ),
        *(
            (b'{"messages": %s}' % value, "messages", "must be a list")
            for value in (b"null", b"5", b"true", b"{}", b'"a"')
        ),
        (rb'{"m\u0065ssages": null}', "messages", "must be a list"),
        *(
            (
                b'{"input": [{"role": "user", "content": "a"}, '
                b'{"type": "message", "role": "assistant", "content": %s}]}' % content,
                f"input[1].content{place}",
                words,
            )
            for content, place, words in (
                (b"[]", "", "is empty"),
                (b"[\n]", "", "is empty"),
                (b'[{"type": "refusal", "refusal": "no"}]', "[0]", "is a refusal"),
            )
        ),
        (b'{"structured_outputs": "a"}', "structured_outputs", "JSON object"),
        (b'{"structured_outputs" :\t[{"regex": "a"}]}', "structured_outputs", "JSON object"),
        (b'{"structured_outputs":3}', "structured_outputs", "JSON object"),
        (b'{"structured_outputs": false}', "structured_outputs", "JSON object"),
        (rb'{"structured\u005Foutputs": "a"}', "structured_outputs", "JSON object"),
        *(
            (
                b'{"tool_choice" : {"function": {"name": "f"}}, '
                b'"tools": [{"function": {"name": "g"}}, %s]}' % tool,
                "tools[1].function.name",
                "is missing",
            )
            for tool in (b"{}", b'{"function": {}}', b'{"function": {"parameters": {}}}')
        ),
    ],
)
def test_a_field_that_vllm_reads_unchecked(stand, openai_error, body, field, words):
    s = stand()
    error = openai_error(s.request("POST", "/v1/echo", content=body, headers=JSON))
    assert (error["code"], error["param"]) == (400, field)
    assert words in error["message"]
    assert s.events == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"top_k": 18446744073709551615}',
        b'{"top_k": -18446744073709551616}',  # vLLM says what is allowed
        b'{"top_k": 184467440737095516160.5}',
        b'{"top_k": "18446744073709551615"}',
        b'{"top_k": "18446744073709551615.0"}',
        rb'{"max\u005Ftokens": 5, "top\u005fk": 18446744073709551615}',
        b'{"top_k": "%s"}' % (b"1" * 5000),  # no integer to Python, nor to vLLM
        b'{"top_k": "12345678901234567890x", "repetition_detection": 5}',
        b'{"seed": 18446744073709551616}',
        b'{"structured_outputs": null}',
        b'{"messages": [], "input": {"content": []}}',
        b'{"messages": null, "prompt": "a"}',
        b'{"messages": null, "input": "a"}',
        b'{"input": [{"role": "assistant", "content": []}, 5]}',
        b'{"input": [{"type": "reasoning", "content": []}]}',
        b'{"input": [{"type": "message", "role": "assistant", "content": "a"}], "content": []}',
        b'{"input": [{"type": "message", "role": "assistant", "content": [5]}], "content": []}',
        b'{"tool_choice": {"function": {"name": "f"}}, "tools": [{"function": {"name": 5}}]}',
        b'{"tool_choice": {"function": {"name": "f"}}, "tools": [null, {"function": 5}]}',
        b'{"tool_choice": {"function": {"name": "f"}}, "tools": {}}',
        b'{"tool_choice": {"type": "function", "name": "f"}, "tools": [{"name": "f"}]}',
        b'{"tool_choice": "required", "tools": [{}]}',
        b'{"structured_outputs": {"regex": "a"}}',
        b'{"tools": [{"top_k": 18446744073709551616, "structured_outputs": 1}]}',
    ],
)
def test_other_fields_are_vllms_to_check(stand, body):
    answer = stand().request("POST", "/v1/echo", content=body, headers=JSON)
    assert answer.json()["bytes"] == len(body)


def test_long_names_of_many_values_take_no_memory_of_their_product():
    """800 KB that would be 2 GB of paths."""
    tracemalloc.start()
    name, numbers = "k" * 800_000, ",".join(["0"] * 2500)
    assert complaint(rf'{{"prompt": "\ud83d\ude00", "{name}": [{numbers}]}}'.encode()) is None
    field, _ = complaint(rf'{{"{name}": [{numbers}, "\ud800"]}}'.encode())
    assert field == "k" * 200
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 * 2**20
