"""Names and paths (fault 34)."""

from __future__ import annotations

import pytest

from jupyter_gpuckpt.errors import BadName
from jupyter_gpuckpt.store import Store, check_name
from jupyter_gpuckpt.store.names import check_key, is_plain_path, key_of, name_of


@pytest.mark.parametrize("name", ["a", "A1", "before_finetune", "v1.2-rc.3", "_x", "9", "n" * 100])
def test_plain_names_are_taken_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("../x", "starts with '.'"),
        ("x/../y", "'/'"),
        (".hidden", "starts with '.'"),
        ("-rf", "starts with '-'"),
        ("a\0b", r"'\x00'"),
        ("a\n", r"'\n'"),
        ("a b", "' '"),
        ("р", "'р' (U+0440)"),  # Cyrillic, looks like p
        ("ａ", "'ａ' (U+FF41)"),
        ("x٣", "'٣' (U+0663)"),  # a digit, but not of ASCII
        ("\ud800", r"'\ud800' (U+D800)"),
        ("a\u202eb", r"'\u202e' (U+202E)"),  # would turn what follows it around
        ("n" * 101, "101 characters"),
        ("n" * 10_000, "10000 characters"),
    ],
)
def test_other_names_are_refused_with_the_reason_and_touch_nothing(store: Store, name: str, why: str) -> None:
    for use in (check_name, store.writer, store.get, lambda name: store.open(name, store.root.parent), store.remove):
        with pytest.raises(BadName) as caught:
            use(name)
        assert why in caught.value.why
        assert len(str(caught.value)) < 600
        str(caught.value).encode()
        assert caught.value.then
    assert not store.root.exists()


@pytest.mark.parametrize("name", ["a", "v1.2-rc.3", "n" * 100])
def test_a_key_is_of_one_name_and_one_notebook_and_no_name_that_is_given_can_be_one(name: str) -> None:
    keys = {key_of(name, notebook) for notebook in ("/home/me/a.ipynb", "/home/me/ü b.ipynb", "")}
    assert len(keys) == 3
    for key in keys:
        assert check_key(key) == key
        assert name_of(key) == name
        with pytest.raises(BadName, match=r"'~'|109 characters"):
            check_name(key)
    assert check_key(name) == name_of(name) == name


@pytest.mark.parametrize(
    "key", ["a~", "a~0123456", "a~012345678", "a~0123456G", "~01234567", "a~01234567~0", "../a~01234567"]
)
def test_what_only_looks_like_a_key_is_refused(key: str) -> None:
    with pytest.raises(BadName):
        check_key(key)


@pytest.mark.parametrize("path", ["a", "pages-1.img", "vram/0", "a/b/c", "ü.img", "..a"])
def test_paths_that_stay_inside_are_plain(path: str) -> None:
    assert is_plain_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "/a", "a/", "a//b", "./a", "a/../b", "../a", "a/.."),
        *("a\0", "a\n", "a\\b", "x" * 256, "x/" * 2100 + "x", "\ud800"),
    ],
)
def test_other_paths_are_not(path: str) -> None:
    assert not is_plain_path(path)
