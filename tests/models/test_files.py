"""Files are written whole or not at all."""

import os

import pytest

from models.files import to_json, write_atomically


def test_a_file_is_made_and_replaced(tmp_path):
    for data in (b"one", b""):
        write_atomically(tmp_path / "a", data)
        assert (tmp_path / "a").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    write_atomically(tmp_path / "a", b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_umask_sets_the_mode(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_json_is_stable_and_finite():
    assert to_json({"b": 1, "a": [None]}) == '{\n "a": [\n  null\n ],\n "b": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))
