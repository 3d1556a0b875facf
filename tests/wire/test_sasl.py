"""SASL/PLAIN: tokens, JAAS texts, and what never shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zufluss.errors import AuthenticationError, ConfigError, ErrorCode
from zufluss.wire.sasl import (
    PLAIN_LOGIN_MODULE,
    TOKEN_BYTES_MAX,
    PlainAuthenticator,
    build_plain,
    parse_jaas,
    parse_plain,
    users_from_jaas,
)

JAAS = f'{PLAIN_LOGIN_MODULE} required user_admin="admin-secret" user_alice="alice-secret";'
NAME = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@pytest.fixture
def authenticator() -> PlainAuthenticator:
    return PlainAuthenticator.from_jaas(JAAS)


def test_each_user_is_known_by_the_own_password_only(authenticator: PlainAuthenticator) -> None:
    assert authenticator.authenticate(b"\0admin\0admin-secret") == "admin"
    assert authenticator.authenticate(b"\0alice\0alice-secret") == "alice"
    for token in (b"\0alice\0admin-secret", b"\0admin\0", b"\0admin\0admin-secret2"):
        with pytest.raises(AuthenticationError) as caught:
            authenticator.authenticate(token)
        assert caught.value.code is ErrorCode.AUTHENTICATE_EXCEPTION


def test_an_unknown_user_and_a_wrong_password_get_the_same_answer(
    authenticator: PlainAuthenticator,
) -> None:
    answers = set()
    for token in (b"\0mallory\0admin-secret", b"\0admin\0wrong"):
        with pytest.raises(AuthenticationError) as caught:
            authenticator.authenticate(token)
        answers.add(str(caught.value))
    assert len(answers) == 1


def test_a_user_may_name_itself_but_nobody_else_to_act_as(
    authenticator: PlainAuthenticator,
) -> None:
    assert authenticator.authenticate(b"alice\0alice\0alice-secret") == "alice"
    with pytest.raises(AuthenticationError, match="act as another user"):
        authenticator.authenticate(b"admin\0alice\0alice-secret")


def test_a_foreign_authorization_id_says_nothing_about_a_wrong_password(
    authenticator: PlainAuthenticator,
) -> None:
    with pytest.raises(AuthenticationError, match="user or password is wrong"):
        authenticator.authenticate(b"admin\0alice\0guess")


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (b"", "3 parts"),
        (b"admin\0admin-secret", "3 parts"),
        (b"\0admin\0admin-secret\0", "3 parts"),
        (b"\0\0admin-secret", "neither empty"),
        (b"\0admin\0", "neither empty"),
        (b"\0admin\0\xff\xfe", "not UTF-8"),
        (b"\0admin\0" + b"x" * TOKEN_BYTES_MAX, "allowed are"),
    ],
)
def test_malformed_tokens_are_refused(
    authenticator: PlainAuthenticator, token: bytes, reason: str
) -> None:
    with pytest.raises(AuthenticationError, match=reason):
        authenticator.authenticate(token)


@given(NAME, NAME)
def test_a_built_token_reads_back_and_authenticates(user: str, password: str) -> None:
    token = build_plain(user, password)
    parsed = parse_plain(token)
    assert (parsed.authzid, parsed.user, parsed.password) == ("", user, password)
    assert PlainAuthenticator({user: password}).authenticate(token) == user


@pytest.mark.parametrize(("user", "password"), [("", "x"), ("x", ""), ("a\0b", "x"), ("x", "\0")])
def test_a_client_without_proper_credentials_is_told_the_keys(user: str, password: str) -> None:
    with pytest.raises(ConfigError, match=r"client\.security\.sasl\.username"):
        build_plain(user, password)


@given(st.binary(max_size=40))
def test_any_bytes_are_refused_as_a_token_with_the_typed_error(token: bytes) -> None:
    with pytest.raises(AuthenticationError):
        PlainAuthenticator({"admin": "admin-secret"}).authenticate(token)


def test_users_of_a_jaas_text() -> None:
    assert users_from_jaas(JAAS) == {"admin": "admin-secret", "alice": "alice-secret"}


@pytest.mark.parametrize(
    ("options", "users"),
    [
        ("user_a='single quotes'", {"a": "single quotes"}),
        ('user_a="with \\"quotes\\" and \\\\"', {"a": 'with "quotes" and \\'}),
        ('user_a="a\'b"', {"a": "a'b"}),
        ('user_a="semi;colon=and//no comment"', {"a": "semi;colon=and//no comment"}),
        ('user_a = "spaced"', {"a": "spaced"}),
        ("user_a=bare", {"a": "bare"}),
        ('user_a="tab\\tand octal \\101"', {"a": "tab\tand octal A"}),
        ('user_a="pässwörd ✓"', {"a": "pässwörd ✓"}),
        ('user_a-b.c@d="x"', {"a-b.c@d": "x"}),
        ('// a comment\n user_a="x" /* another;\n one */ user_b="y"', {"a": "x", "b": "y"}),
        ('username="admin" password="for clients" user_a="x"', {"a": "x"}),
    ],
)
def test_quotes_escapes_spaces_and_comments(options: str, users: dict[str, str]) -> None:
    assert users_from_jaas(f"{PLAIN_LOGIN_MODULE}\n  REQUIRED\n  {options};\n") == users


def test_a_text_for_clients_can_be_taken_apart() -> None:
    entry = parse_jaas(f'{PLAIN_LOGIN_MODULE} required username="alice" password="secret";')
    assert entry.options == {"username": "alice", "password": "secret"}


SECRET = "TOP-SECRET"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not start with"),
        (SECRET, "does not start with"),
        (f'{PLAIN_LOGIN_MODULE} required user_a="{SECRET}"', "semicolon"),
        (f'{PLAIN_LOGIN_MODULE} mandatory user_a="{SECRET}";', "control flag"),
        (f'{PLAIN_LOGIN_MODULE} user_a="{SECRET}";', "control flag"),
        (f'{PLAIN_LOGIN_MODULE} required user_a="{SECRET};', "open quote"),
        (f'{PLAIN_LOGIN_MODULE} required user_a "{SECRET}";', "option 1"),
        (f'{PLAIN_LOGIN_MODULE} required user_a="x" {SECRET};', "option 2"),
        (f'{PLAIN_LOGIN_MODULE} required user_a="x" user_a="{SECRET}";', "option 2 repeats"),
        (f'{PLAIN_LOGIN_MODULE} required password="{SECRET}";', "declares no user"),
        (f'{PLAIN_LOGIN_MODULE} required user_="{SECRET}";', "empty"),
        (f'{PLAIN_LOGIN_MODULE} required user_{SECRET}="";', "empty"),
        (f'{PLAIN_LOGIN_MODULE} required user_a="{SECRET}"; and more', "follows its semicolon"),
        (f'other.Module required user_a="{SECRET}";', "login module"),
        (f"{PLAIN_LOGIN_MODULE} required /* {SECRET}", "open comment"),
    ],
)
def test_a_bad_jaas_text_is_refused_with_the_reason_and_without_the_secret(
    text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        users_from_jaas(text)
    assert "security.sasl.plain.jaas.config" in str(caught.value)
    assert SECRET not in str(caught.value)


@given(st.text(max_size=60) | st.text('"=;/*\\ auser_', max_size=30).map(JAAS[:90].__add__))
def test_any_text_is_a_jaas_text_or_a_typed_error(text: str) -> None:
    try:
        users_from_jaas(text)
    except ConfigError:
        pass


def test_no_repr_shows_a_password() -> None:
    assert "secret" not in repr(PlainAuthenticator.from_jaas(JAAS))
    assert "secret" not in repr(parse_jaas(JAAS))
    assert "secret" not in repr(parse_plain(build_plain("admin", "admin-secret")))
