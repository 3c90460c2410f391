"""Files of keys: what they may hold, who may read them, and what is refused."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from client_apps.data.key_files import read_allowed_apps, read_allowed_keys, site_key
from tests.support.command_line import printed_by, refused_by
from tp_flower.errors import SettingsError, SiteError

A = "0a" * 32
B = "0B" * 32
WAIT_AND_PRINT = """
import sys, pathlib
from client_apps.data.key_files import site_key
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(site_key(folder).public.hex())
"""


@pytest.fixture
def write(tmp_path):
    def write(content, mode=0o600):
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return path

    return write


def refused(match):
    """Expect a file to be refused, with such a text."""
    return pytest.raises(SettingsError, match=match)


def test_no_file_and_no_pipe_is_read_and_errors_tell_no_path(write, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, match in (
        (tmp_path / "none", "cannot be read: No such file"),
        (tmp_path, "allowed-keys is not a file"),
        (tmp_path / "pipe", "allowed-keys is not a file"),
        (write("short"), "line 1: it must be the name of a site"),
    ):
        with refused(match) as caught:
            read_allowed_keys(path)
        assert str(tmp_path) not in str(caught.value)
        assert "short" not in str(caught.value)
    with refused("keys has more than 1048576 bytes"):
        read_allowed_keys(write(bytes((1 << 20) + 1)))


def test_names_and_keys(write):
    text = f"# ours\n\n us  {A} # since May\nthe shop\t{B}\n"
    names = read_allowed_keys(write(text, 0o644))
    assert names == {bytes.fromhex(A): "us", bytes.fromhex(B): "the shop"}
    # others may read it, and not change it
    for mode in (0o602, 0o620, 0o666):
        match = rf"allowed-keys may be changed by others.*mode {mode:04o}"
        with refused(match):
            read_allowed_keys(write(f"us {A}", mode))


def test_list_of_keys_of_another_form(write):
    lines = (A, "us", f"us {A}0", f"us {A[1:]}", f"us {A[:-1]}g", f"us {A} x")
    form = ", line 2: it must be the name of a site and its"
    for text, match in (
        *((f"uk {B}\n{line}\n", form) for line in lines),
        (f"us {A}\n\nus {B}\n", ", line 3: the name is listed twice"),
        (f"us {A}\n\nuk {A.upper()}\n", ", line 3: the key is listed twice"),
        ("", " lists no key"),
        ("\n# nobody\n", " lists no key"),
        (b"\xff\xfe", " is not UTF-8 text"),
    ):
        with refused(f"allowed-keys{match}"):
            read_allowed_keys(write(text))


def test_hashes_of_apps_and_comments(write):
    path = write(f"# ours\n\n  {A.upper()} # release 1\n{A}\n{B}\n", 0o640)
    assert read_allowed_apps(path) == {A, B.lower()}


def test_list_of_apps_of_another_form(write):
    form = "it must be the SHA-256 of an app bundle, 64 hexadecimal digits"
    lines = (f"{A} {B}", f"{A}0", A[1:], f"{A[:-1]}g", "*", f"sha256:{A}")
    for text, match in (
        *((f"{B}\n{line}\n", f", line 2: {form}") for line in lines),
        ("# none\n", " lists no app bundle"),
        (b"\xff\xfe", " is not UTF-8 text"),
    ):
        with refused(f"allowed-apps{match}"):
            read_allowed_apps(write(text))
    for mode in (0o602, 0o620):
        with refused("apps may be changed by others"):
            read_allowed_apps(write(A, mode))


def test_a_site_key_is_made_once_for_its_owner_alone(tmp_path):
    folder = tmp_path / "state"
    pair = site_key(folder)
    assert site_key(folder).private == pair.private
    assert site_key(tmp_path / "other").public != pair.public
    assert (folder / "site-key").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["site-key"]


def test_processes_that_make_a_site_key_at_once_agree(tmp_path):
    argv = [sys.executable, "-c", WAIT_AND_PRINT, str(tmp_path / "s")]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    workers = [subprocess.Popen(argv, text=True, **pipes) for _ in range(4)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    keys = {worker.communicate(timeout=300)[0].strip() for worker in workers}
    assert keys == {site_key(tmp_path / "s").public.hex()}


def test_damaged_key_and_folder_that_cannot_be_written(tmp_path):
    public = site_key(tmp_path).public
    shutil.copy2(tmp_path / "site-key", tmp_path / "copy")
    for text, mode, match in (
        ("", 0o640, "may be read or changed by others"),
        ("", 0o600, "in the state folder is damaged"),
        ("ab", 0o600, "in the state folder is damaged"),
        ("c0ffee" * 10 + "12x", 0o600, "in the state folder is damaged"),
    ):
        (tmp_path / "site-key").write_text(text)
        (tmp_path / "site-key").chmod(mode)
        with refused(f"site-key {match}"):
            site_key(tmp_path)
    # both remedies that the error names
    shutil.copy2(tmp_path / "copy", tmp_path / "site-key")
    assert site_key(tmp_path).public == public
    (tmp_path / "site-key").unlink()
    assert site_key(tmp_path).public != public
    (tmp_path / "file").write_text("")
    with pytest.raises(SiteError, match="cannot write site-key into the state"):
        site_key(tmp_path / "file")


def test_command_prints_the_public_key_or_what_is_wrong(tmp_path):
    folder = tmp_path / "state"
    printed = printed_by("site-key", "--state-dir", folder)
    assert re.fullmatch(r"[0-9a-f]{64}\n", printed)
    assert printed.strip() == site_key(folder).public.hex()
    assert site_key(folder).private.hex() not in printed
    (folder / "site-key").write_text("no key")
    for place, error in (
        ("state", "'state' is not an absolute path"),
        (folder, "site-key in the state folder is damaged"),
    ):
        assert error in refused_by("site-key", "--state-dir", place, status=2)
