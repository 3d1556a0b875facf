"""The text forms of durations, sizes, lists, maps and endpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.config import values
from zufluss.config.values import Endpoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3min", 180_000),
        ("3 min", 180_000),
        (" 3 m ", 180_000),
        ("7 d", 7 * 86_400_000),
        ("7 days", 7 * 86_400_000),
        ("1h", 3_600_000),
        ("2 hours", 7_200_000),
        ("30s", 30_000),
        ("30 SEC", 30_000),
        ("1 second", 1_000),
        ("100ms", 100),
        ("100 millis", 100),
        ("250", 250),
        ("5000 us", 5),
        ("5000µs", 5),
        ("0ms", 0),
    ],
)
def test_durations_read_as_in_fluss(text: str, expected: int) -> None:
    # An existing server.yaml would change its meaning without these forms.
    assert values.parse_duration_ms(text) == expected


@pytest.mark.parametrize("text", ["", "min", "3 fortnights", "-1s", "1.5s", "3min 2s", "7 us"])
def test_a_duration_that_is_none_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="whole number with a unit: ms, s, min, h or d"):
        values.parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64mb", 64 << 20),
        ("64 m", 64 << 20),
        ("1gb", 1 << 30),
        ("1024m", 1 << 30),
        ("4k", 4096),
        ("4 KB", 4096),
        ("2 tebibytes", 2 << 40),
        ("17", 17),
        ("17 bytes", 17),
        ("1b", 1),
    ],
)
def test_memory_sizes_read_as_in_fluss(text: str, expected: int) -> None:
    assert values.parse_memory_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "mb", "64 mib", "-1", "1.5gb", "9" * 30, "99999999tb"])
def test_a_memory_size_that_is_none_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole number with a unit: b, kb, mb, gb or tb"):
        values.parse_memory_bytes(text)


@given(st.integers(0, values.INT64_MAX))
def test_a_formatted_duration_parses_back_to_the_same_value(value: int) -> None:
    assert values.parse_duration_ms(values.format_duration(value)) == value


@given(st.integers(0, values.INT64_MAX))
def test_a_formatted_size_parses_back_to_the_same_value(value: int) -> None:
    assert values.parse_memory_bytes(values.format_memory(value)) == value


@given(st.text())
def test_no_text_makes_a_parser_fail_with_anything_but_a_value_error(text: str) -> None:
    # Table properties come from the wire: whatever they hold must end as a refusal.
    for parse in (
        values.parse_duration_ms,
        values.parse_memory_bytes,
        values.parse_bool,
        values.parse_int,
        values.parse_list,
        values.parse_map,
        values.parse_endpoints,
    ):
        try:
            parse(text)
        except ValueError:
            continue


def test_an_endpoint_has_a_name_a_host_and_a_port() -> None:
    assert values.parse_endpoint("CLIENT://db.example:9123") == Endpoint(
        "CLIENT", "db.example", 9123
    )
    assert values.parse_endpoint("FLUSS://:0") == Endpoint("FLUSS", "", 0)


def test_an_ipv6_endpoint_keeps_its_brackets_in_text_only() -> None:
    endpoint = values.parse_endpoint("FLUSS://[::1]:9123")
    assert endpoint == Endpoint("FLUSS", "::1", 9123)
    assert str(endpoint) == "FLUSS://[::1]:9123"


@pytest.mark.parametrize("text", ["localhost:9123", "FLUSS://localhost", "A://b:99999", "A://b:c"])
def test_an_endpoint_that_is_none_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="NAME://host:port"):
        values.parse_endpoints(text)


def test_a_listener_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="each name once; A is twice"):
        values.parse_endpoints("A://x:1,A://y:2")


def test_a_map_refuses_an_entry_without_value_and_a_key_twice() -> None:
    assert values.parse_map("CLIENT:sasl, INTERNAL:plaintext") == {
        "CLIENT": "sasl",
        "INTERNAL": "plaintext",
    }
    with pytest.raises(ValueError, match="'CLIENT' is none"):
        values.parse_map("CLIENT")
    with pytest.raises(ValueError, match="'A' is there twice"):
        values.parse_map("A:1,A:2")


def test_a_list_with_an_empty_item_is_refused() -> None:
    assert values.parse_list(" ") == ()
    assert values.parse_list("a, b") == ("a", "b")
    for text in (",", "a,,b", "a,"):
        with pytest.raises(ValueError, match="none of them empty"):
            values.parse_list(text)
