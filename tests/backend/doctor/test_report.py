# SPDX-License-Identifier: Apache-2.0
"""What the doctor prints, and its exit status."""

import json
from dataclasses import replace

from mla_backend import doctor
from mla_backend.doctor import facts as facts_module
from mla_backend.doctor import implementations, report
from mla_backend.doctor.checks import CHECKS
from mla_backend.doctor.report import Result
from tests.backend.doctor.healthy import HEALTHY


def test_text_is_aligned_and_within_the_width():
    text = report.as_text(
        [Result("a", "ok", "x " * 80), Result("long name", "fail", "y", "mend it")]
    )
    assert text.splitlines() == [
        "ok    a          " + ("x " * 42).strip(),
        " " * 17 + ("x " * 38).strip(),
        "fail  long name  y",
        "                 mend: mend it",
        "",
        "1 ok, 0 warn, 1 fail",
    ]


def test_json_shape_and_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(facts_module, "collect", lambda: HEALTHY)
    assert doctor.main(json_output=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["ok"]) == (1, True)
    assert len(shown["checks"]) == len(CHECKS) + len(implementations.results(HEALTHY))
    assert set(shown["checks"][0]) == {"name", "status", "found", "mend"}

    monkeypatch.setattr(facts_module, "collect", lambda: replace(HEALTHY, nvidia_driver=True))
    assert doctor.main() == 0  # a warning breaks nothing
    assert " ok, 1 warn, 0 fail" in capsys.readouterr().out
    monkeypatch.setattr(facts_module, "collect", lambda: replace(HEALTHY, libnuma=False))
    assert doctor.main(json_output=True) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
