"""Files of keys: what they may hold, who may read them, and what is refused."""

import base64
import os
import re
import subprocess
import sys

import pytest

from client_apps.cli import main
from client_apps.data.key_files import (
    read_allowed_keys,
    read_secret,
    secret_digest,
    site_key,
)
from tp_flower.errors import SettingsError, SiteError
from tp_flower.privacy.key_agreement import GroupSecret

VALUE = bytes(range(100, 140))
A, B = "0a" * 32, "0B" * 32


@pytest.fixture
def write(tmp_path):
    def write(content, mode=0o600):
        path = tmp_path / "file"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
        return path

    return write


class TestSecret:
    def test_every_way_to_write_it_is_the_same_secret(self, write):
        text = base64.b64encode(VALUE)
        written = [
            VALUE.hex(),
            f" {VALUE.hex().upper()}\n",
            text,
            text[:20] + b"\r\n" + text[20:] + b"\n",
            VALUE,
        ]
        found = {read_secret(write(content)) for content in written}
        assert len(found) == 1
        (secret,) = found
        assert len(secret.value) == 32
        assert not secret.is_simulated

    def test_another_file_is_another_secret(self, write):
        assert read_secret(write(VALUE)) != read_secret(write(VALUE + b"\n"))
        assert read_secret(write(VALUE.hex())) != read_secret(write(VALUE[1:].hex()))

    @pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
    def test_its_owner_alone_may_read_it(self, write, mode):
        assert read_secret(write(VALUE, mode)) == read_secret(write(VALUE))

    @pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o601, 0o644])
    def test_others_may_not(self, write, mode):
        match = rf"secret-file may be read or changed by others.*mode {mode:04o}"
        with pytest.raises(SettingsError, match=match):
            read_secret(write(VALUE, mode))

    @pytest.mark.parametrize(
        ("content", "held"),
        [
            (b"", 0),
            (VALUE[:31], 31),
            (VALUE[:31].hex(), 31),
            (base64.b64encode(VALUE[:31]), 31),
            # long enough as a text, but the text stands for fewer bytes
            ("0123456789abcdef" * 3, 24),
        ],
    )
    def test_short_one(self, write, content, held):
        match = f"secret-file holds {held} bytes, fewer than 32"
        with pytest.raises(SettingsError, match=match):
            read_secret(write(content))

    @pytest.mark.parametrize("content", [bytes(64), "00" * 32, b"\xff\x00" * 40])
    def test_one_that_is_not_random(self, write, content):
        with pytest.raises(SettingsError, match=r"not random: it has [12] different"):
            read_secret(write(content))

    def test_large_one(self, write):
        with pytest.raises(SettingsError, match="has more than 1048576 bytes"):
            read_secret(write(bytes((1 << 20) + 1)))

    def test_no_file(self, tmp_path):
        with pytest.raises(SettingsError, match="cannot be read: No such file"):
            read_secret(tmp_path / "none")
        with pytest.raises(SettingsError, match="secret-file is not a file"):
            read_secret(tmp_path)

    def test_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe", 0o600)
        with pytest.raises(SettingsError, match="secret-file is not a file"):
            read_secret(tmp_path / "pipe")

    def test_errors_tell_no_path(self, write, tmp_path):
        for path in (write(b"short"), tmp_path, tmp_path / "none"):
            with pytest.raises(SettingsError) as caught:
                read_secret(path)
            assert str(tmp_path) not in str(caught.value)
            assert "short" not in str(caught.value)

    def test_digest_tells_equal_secrets_of_one_run(self):
        one, other = GroupSecret(VALUE[:32]), GroupSecret(VALUE[1:33])
        digests = {secret_digest(s, run) for s in (one, other) for run in (1, 2)}
        assert len(digests) == 4
        assert secret_digest(one, 1) == secret_digest(GroupSecret(VALUE[:32]), 1)
        assert one.value.hex() not in digests


class TestAllowedKeys:
    def test_names_and_keys(self, write):
        text = f"# ours\n\n us  {A} # since May\nthe shop\t{B}\n"
        found = read_allowed_keys(write(text, 0o644))
        assert found == {bytes.fromhex(A): "us", bytes.fromhex(B): "the shop"}

    @pytest.mark.parametrize(
        "line", [A, "us", f"us {A}0", f"us {A[1:]}", f"us {A[:-1]}g", f"us {A} x"]
    )
    def test_line_of_another_form(self, write, line):
        match = "allowed-keys, line 2: it must be the name of a site and its public key"
        with pytest.raises(SettingsError, match=match):
            read_allowed_keys(write(f"uk {B}\n{line}\n"))

    @pytest.mark.parametrize(
        ("line", "what"), [(f"us {B}", "name"), (f"uk {A.upper()}", "key")]
    )
    def test_site_named_twice(self, write, line, what):
        match = f"allowed-keys, line 3: the {what} stands there twice"
        with pytest.raises(SettingsError, match=match):
            read_allowed_keys(write(f"us {A}\n\n{line}\n"))

    @pytest.mark.parametrize("text", ["", "\n# nobody\n"])
    def test_nobody(self, write, text):
        with pytest.raises(SettingsError, match="allowed-keys lists no key"):
            read_allowed_keys(write(text))

    def test_no_text(self, write):
        with pytest.raises(SettingsError, match="allowed-keys is not UTF-8 text"):
            read_allowed_keys(write(b"\xff\xfe"))

    @pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
    def test_others_may_not_change_it(self, write, mode):
        match = rf"allowed-keys may be changed by others.*mode {mode:04o}"
        with pytest.raises(SettingsError, match=match):
            read_allowed_keys(write(f"us {A}", mode))


WAIT_AND_PRINT = """
import sys, pathlib
from client_apps.data.key_files import site_key
folder = pathlib.Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(site_key(folder).public.hex())
"""


class TestSiteKey:
    def test_is_made_once_for_its_owner_alone(self, tmp_path):
        folder = tmp_path / "state"
        pair = site_key(folder)
        assert site_key(folder).private == pair.private
        assert site_key(tmp_path / "other").public != pair.public
        assert (folder / "site-key").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in folder.iterdir()] == ["site-key"]

    def test_processes_that_make_it_at_once_agree(self, tmp_path):
        argv = [sys.executable, "-c", WAIT_AND_PRINT, str(tmp_path / "s")]
        workers = [
            subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(4)
        ]
        for worker in workers:
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        found = {worker.communicate(timeout=60)[0].strip() for worker in workers}
        assert found == {site_key(tmp_path / "s").public.hex()}

    def test_key_that_others_may_read(self, tmp_path):
        site_key(tmp_path)
        (tmp_path / "site-key").chmod(0o640)
        with pytest.raises(SettingsError, match="site-key may be read or changed by"):
            site_key(tmp_path)

    @pytest.mark.parametrize("text", ["", "ab", "c0ffee" * 10 + "12x"])
    def test_damaged_key(self, tmp_path, text):
        site_key(tmp_path)
        (tmp_path / "site-key").write_text(text)
        with pytest.raises(SettingsError, match="site-key in the state folder is dam"):
            site_key(tmp_path)

    def test_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(SiteError, match="cannot write site-key into the state"):
            site_key(tmp_path / "file")

    def test_command_prints_the_public_key(self, tmp_path, capsys):
        folder = tmp_path / "state"
        main(["site-key", "--state-dir", str(folder)])
        printed = capsys.readouterr().out
        assert re.fullmatch(r"[0-9a-f]{64}\n", printed)
        assert printed.strip() == site_key(folder).public.hex()
        assert site_key(folder).private.hex() not in printed

    def test_command_refuses_a_folder_that_depends_on_where_it_is_run(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["site-key", "--state-dir", "state"])
        assert "'state' is not an absolute path" in capsys.readouterr().err

    def test_command_says_what_is_wrong(self, tmp_path, capsys):
        (tmp_path / "site-key").write_text("no key")
        (tmp_path / "site-key").chmod(0o600)
        with pytest.raises(SystemExit, match="1"):
            main(["site-key", "--state-dir", str(tmp_path)])
        shown = capsys.readouterr()
        assert not shown.out
        assert shown.err.startswith("site-key in the state folder is damaged")
