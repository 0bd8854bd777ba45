"""Ranges as RFC 9110 tells them (its own examples, section 14.1.2), and names that stay inside their header."""

import email.message

import pytest

from api.ranges import RangeNotSatisfiable, attachment, span


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param("bytes=0-499", (0, 500), id="the first 500 bytes"),
        pytest.param("bytes=500-999", (500, 1000), id="the second 500 bytes"),
        pytest.param("bytes=-500", (9500, 10_000), id="the final 500 bytes"),
        pytest.param("bytes=9500-", (9500, 10_000), id="the final 500 bytes, by their start"),
        pytest.param("bytes=9500-99999", (9500, 10_000), id="an end beyond the end is the end"),
        pytest.param("bytes=-99999", (0, 10_000), id="a suffix longer than the whole is the whole"),
        pytest.param("bytes=0-0", (0, 1), id="the first byte only"),
        pytest.param("Bytes=0-0", (0, 1), id="a unit in capitals (RFC 9110, 14.1)"),
        pytest.param(None, None, id="no range"),
        pytest.param("bytes=0-0,-1", None, id="several at once: the whole"),
        pytest.param("bytes=5-2", None, id="backwards: ignored"),
        pytest.param("bytes=-", None, id="says nothing: ignored"),
        pytest.param("lines=1-2", None, id="another unit: ignored"),
        pytest.param("bytes=one-two", None, id="no numbers: ignored"),
    ],
)
def test_a_range_is_read_as_the_rfc_says(header, expected):
    assert span(header, size=10_000) == expected


@pytest.mark.parametrize("header", ["bytes=10000-", "bytes=20000-20001", "bytes=-0"])
def test_a_range_beyond_the_end_says_how_long_it_is(header):
    with pytest.raises(RangeNotSatisfiable) as caught:
        span(header, size=10_000)
    assert caught.value.headers["content-range"] == "bytes */10000"


@pytest.mark.parametrize("name", ['a".html', "a\r\nSet-Cookie: x", "naïve \u2028 name", "../../etc/passwd", "a;b=c"])
def test_no_file_name_breaks_out_of_its_header(name):
    value = attachment(name)
    assert value.isascii()
    assert value.isprintable()
    message = email.message.Message()
    message["content-disposition"] = value
    # The parser of the standard library strips the star of `filename*`.
    assert [key for key, _ in message.get_params(header="content-disposition")] == [
        "attachment",
        "filename",
        "filename",
    ]
