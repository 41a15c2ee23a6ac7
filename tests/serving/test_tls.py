# SPDX-License-Identifier: Apache-2.0
"""Options of TLS that do not go together are refused by name, before a model is loaded."""

import os
from argparse import Namespace
from pathlib import Path

import pytest
from mla_serving.server import tls

NOTHING = dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_ciphers"))
NOTHING |= {"ssl_cert_reqs": 0, "enable_ssl_refresh": False}


@pytest.fixture
def files(tls_files):
    return tls_files


def check(files, **given):
    tls.check(Namespace(**NOTHING | {name: files.get(x, x) for name, x in given.items()}))


def test_what_goes_together(files):
    check(files)
    both = {"ssl_certfile": "cert", "ssl_keyfile": "key"}
    check(files, **both, ssl_ca_certs="cert", ssl_cert_reqs=2, enable_ssl_refresh=True)
    check(files, **both, ssl_ciphers="ECDHE+AESGCM")


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_is_not_there(files, name):
    option = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{option} .*nowhere.pem: no such file or directory"):
        check(files, **{name: "nowhere"})


@pytest.mark.parametrize(
    "given",
    [
        {"ssl_keyfile": "key"},
        {"ssl_ca_certs": "cert"},
        {"ssl_ciphers": "x"},
        {"ssl_cert_reqs": 2},
        {"enable_ssl_refresh": True},
    ],
)
def test_what_needs_a_certificate(files, given):
    option = "--" + next(iter(given)).replace("_", "-")
    with pytest.raises(ValueError, match=f"^{option} needs --ssl-certfile"):
        check(files, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"ssl_certfile": "cert"},  # without its key
        {"ssl_certfile": "cert", "ssl_keyfile": "other"},
        {"ssl_certfile": "junk", "ssl_keyfile": "key"},
        {"ssl_certfile": "folder", "ssl_keyfile": "key"},
        {"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ca_certs": "junk"},
        {"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_ciphers": "ZZZ"},
        {"ssl_certfile": "cert", "ssl_keyfile": "key", "ssl_cert_reqs": 9},
    ],
)
def test_what_does_not_go_together_is_named(files, given):
    with pytest.raises(ValueError, match=r"^--ssl-certfile .+: .") as refused:
        check(files, **given)
    for name, value in given.items():
        assert f"--{name.replace('_', '-')} {files.get(value, value)}" in str(refused.value)


def test_the_server_asks(files):
    from mla_serving.server import args
    from mla_serving.server.settings import read_settings

    given = ["--ssl-certfile", files["cert"], "--ssl-keyfile", files["other"]]
    with pytest.raises(ValueError, match=f"^--ssl-certfile {files['cert']} --ssl-keyfile .*"):
        args.parse(read_settings(given, {}))


def test_what_can_be_read_once_is_left_to_the_server(files, tmp_path):
    """A pipe would then be empty, and a passphrase asked for twice."""
    locked, pipe = tmp_path / "locked.pem", tmp_path / "pipe"
    locked.write_text(f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{Path(files['other']).read_text()}")
    os.mkfifo(pipe)
    for key in (locked, pipe):
        check(files, ssl_certfile="cert", ssl_keyfile=str(key))


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ("read_bytes", r"^--ssl-certfile .*--ssl-keyfile .*Permission denied"),
        ("exists", r"^--ssl-certfile .*cert.pem: Permission denied$"),  # of its folder
    ],
)
def test_a_file_that_may_not_be_looked_at(files, monkeypatch, asks, said):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, asks, refuse)
    with pytest.raises(ValueError, match=said):
        check(files, ssl_certfile="cert", ssl_keyfile="key")
