"""What may be asked: every option is checked, and what is not supported is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.openai_api import (
    NEUTRAL,
    ApiError,
    Call,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_json,
    parse_tokenize,
)

HELLO = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> Call:
    return parse_chat({"model": "m", "messages": HELLO, **more})


def completion(**more: Any) -> Call:
    return parse_completion({"model": "m", "prompt": "hello", **more})


def refusal(call: Any, **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**more)
    body = caught.value.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return caught.value


def test_defaults_are_openais() -> None:
    call = chat()
    assert (call.temperature, call.top_p, call.top_k, call.seed, call.max_tokens) == (1.0, 1.0, 0, None, None)
    assert (call.stream, call.include_usage, call.stop, call.ignore_eos) == (False, False, (), False)


def test_every_supported_option_arrives() -> None:
    call = chat(
        max_tokens=7,
        min_tokens=3,
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=-1,
        stop=["a", "b"],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        user="u",
        n=3,
        best_of=3,
        stop_token_ids=[5],
        min_p=0.25,
        frequency_penalty=-2,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "07": 2.5},
        logprobs=True,
        top_logprobs=4,
    )
    assert call == Call(
        chat=True,
        model="m",
        messages=HELLO,
        max_tokens=7,
        min_tokens=3,
        temperature=0.0,
        top_p=0.5,
        top_k=4,
        seed=-1,
        stop=("a", "b"),
        stop_token_ids=(5,),
        ignore_eos=True,
        stream=True,
        include_usage=True,
        n=3,
        min_p=0.25,
        frequency_penalty=-2.0,
        presence_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0), (7, 2.5)),
        logprobs=4,
    )
    assert chat(logprobs=True).logprobs == 0
    assert chat(prompt_logprobs=2).prompt_logprobs == 2
    call = completion(echo=True, logprobs=5, max_tokens=0, add_special_tokens=False)
    assert (call.echo, call.logprobs, call.max_tokens, call.add_special_tokens) == (True, 5, 0, False)


def test_response_formats() -> None:
    assert chat(response_format={"type": "text"}).schema is None
    call = chat(response_format={"type": "json_object"})
    assert (call.response_format, json.loads(call.schema or "")) == ("json_object", {"type": "object"})
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    call = completion(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert (call.response_format, json.loads(call.schema or "")) == ("json_schema", schema)


def test_what_contradicts_itself_is_refused() -> None:
    json_mode = {"type": "json_object"}
    assert refusal(chat, top_logprobs=2).param == "top_logprobs"
    assert refusal(chat, response_format=json_mode, ignore_eos=True).param == "ignore_eos"
    assert refusal(chat, response_format=json_mode, min_tokens=1).param == "min_tokens"
    assert refusal(chat, stream=True, prompt_logprobs=1).param == "prompt_logprobs"
    assert refusal(completion, max_tokens=0).param == "max_tokens"


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_completion_tokens=9).max_tokens == 9
    assert chat(max_completion_tokens=9, max_tokens=9).max_tokens == 9
    assert refusal(chat, max_completion_tokens=9, max_tokens=8).param == "max_completion_tokens"
    assert refusal(completion, max_completion_tokens=9).code == "unknown_parameter"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", True),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop", [None]),
        ("stream", 1),
        ("stream", "yes"),
        ("ignore_eos", 0),
        ("user", 5),
        ("stream_options", {"include_usage": True}),
        ("stop_token_ids", [-1]),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", "1"),
        ("logprobs", 0),
        ("logprobs", 1),
        ("top_logprobs", 2),
        ("top_logprobs", 21),
        ("prompt_logprobs", -1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", "much"),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", [5]),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "mode": 1}}),
        ("response_format", {"type": "json_object", "json_schema": {}}),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("echo", True),
        ("best_of", 2),
        ("min_p", 1.1),
        ("suffix", "x"),
        ("store", True),
        ("frobnicate", 1),
        ("frobnicate", None),
    ],
)
def test_a_bad_or_unsupported_option_is_named(option: str, value: Any) -> None:
    error = refusal(chat, **{option: value})
    assert error.status == 400
    assert (error.param or "").startswith(option)
    assert option in error.message


@pytest.mark.parametrize("option", sorted(NEUTRAL))
def test_a_value_that_asks_for_nothing_is_accepted(option: str) -> None:
    for value in (*NEUTRAL[option], None):
        assert chat(**{option: value}) == chat()
        if option not in ("add_special_tokens", "echo"):  # a plain prompt has them
            assert completion(**{option: value}) == completion()


def test_null_is_absent() -> None:
    assert chat(max_tokens=None, temperature=None, stop=None, stream=None, stream_options=None, seed=None) == chat()


def test_min_tokens_above_max_tokens() -> None:
    assert refusal(chat, min_tokens=5, max_tokens=4).param == "min_tokens"


def test_content_as_text_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "developer", "content": parts}]).messages == [{"role": "system", "content": "ab"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        ([5], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        (
            [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_a_bad_message_is_named_by_its_place(messages: Any, param: str) -> None:
    assert refusal(chat, messages=messages).param == param


def test_messages_of_an_earlier_answer_pass() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[*HELLO, answer]).messages == [*HELLO, {"role": "assistant", "content": "hi"}]


def test_prompts() -> None:
    assert completion(prompt=[1, 2]).prompt == [1, 2]
    assert completion(prompt=["one"]).prompt == "one"
    assert completion(prompt=[[3]]).prompt == [3]
    for prompt in (["a", "b"], [[1], [2]], [1, "a"], [1.0], [True], 5, {}):
        assert (refusal(completion, prompt=prompt).param or "").startswith("prompt")
    assert completion().add_special_tokens and not completion(add_special_tokens=False).add_special_tokens
    assert not chat().add_special_tokens
    assert refusal(lambda: parse_completion({"model": "m"})).code == "missing_required_parameter"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"NaN", b'{"a": Infinity}', b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_body_that_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert caught.value.status == 400


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse_tokenize({"prompt": "x"}).prompt == "x"
    assert parse_tokenize({"messages": HELLO, "add_generation_prompt": False}).add_generation_prompt is False
    for body in (
        {},
        {"prompt": "x", "messages": HELLO},
        {"messages": HELLO, "add_special_tokens": True},
        {"prompt": "x", "nix": 1},
    ):
        with pytest.raises(ApiError):
            parse_tokenize(body)


def test_detokenize() -> None:
    assert parse_detokenize({"tokens": [1, 2]}).tokens == (1, 2)
    for body in ({}, {"tokens": "x"}, {"tokens": [1.0]}, {"tokens": [1], "prompt": "x"}):
        with pytest.raises(ApiError):
            parse_detokenize(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
options = st.sampled_from(
    [
        *("messages", "prompt", "max_tokens", "temperature", "stop", "stream", "stream_options", "seed", "x", "n"),
        *("logprobs", "top_logprobs", "logit_bias", "response_format", "min_p", "best_of", "stop_token_ids"),
        *NEUTRAL,
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(options, json_values, max_size=5))
def test_any_json_is_a_call_or_an_error_never_a_crash(more: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_completion):
        body = {"model": "m", "messages": HELLO} if parse is parse_chat else {"model": "m", "prompt": "x"}
        try:
            assert isinstance(parse({**body, **more}), Call)
        except ApiError as error:
            assert error.status == 400
            assert len(json.dumps(error.body())) < 2000
