"""What a request looks like before it is sent: targets and heads."""

from __future__ import annotations

import pytest

from loadgen.http import Origin
from loadgen.wire import RequestHead
from models.errors import UserError
from tests.loadgen.test_http import call


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://h", "h", "/v1/x"),
        ("http://h:8000/", "h:8000", "/v1/x"),
        ("http://h:8000/v1", "h:8000", "/v1/x"),
        ("https://h:443/a/v1/", "h", "/a/v1/x"),
        ("https://h:80/a", "h:80", "/a/v1/x"),
        ("http://[::1]:80", "[::1]", "/v1/x"),
    ],
)
def test_target_urls(url: str, authority: str, path: str) -> None:
    origin = Origin.parse(url)
    assert (origin.authority, origin.path("/v1/x")) == (authority, path)


@pytest.mark.parametrize(
    "url",
    ["h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://u:p@h", "http://h/?q", "http://h/a b", ""],
)
def test_what_is_no_target_is_refused_by_name(url: str) -> None:
    with pytest.raises(UserError) as raised:
        Origin.parse(url)
    assert raised.value.remedy
    assert "p@h" not in str(raised.value)


def test_headers_of_the_user_win_but_cannot_break_the_request() -> None:
    origin = Origin.parse("http://h")
    head = RequestHead(origin, {"Authorization": "Bearer s", "Host": "virtual", "Accept": "*/*"})
    text = head.request(call()).decode()
    assert "authorization: Bearer s\r\n" in text and "host: virtual\r\n" in text and "accept: */*\r\n" in text
    assert text.count("host:") == 1 and text.endswith('\r\n\r\n{"a":1}')
    bad = [
        {"a": "secret\r\nx: y"},
        {"a\n": "secret"},
        {"": "secret"},
        {"Content-Length": "9"},
        {"traceparent": "secret"},
    ]
    for headers in bad:
        with pytest.raises(UserError) as raised:
            RequestHead(origin, headers)
        assert "secret" not in str(raised.value)
    with pytest.raises(UserError):
        head.request(call(path="/x y"))
