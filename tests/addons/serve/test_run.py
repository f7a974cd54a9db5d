"""A server as a process: its address, and its end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import uvicorn

from qsample.addons.serve.run import MAX_SECONDS_OF_A_REQUEST, run
from qsample.addons.serve.settings import ServeSettings
from qsample.cli import run as main
from qsample.errors import QsampleError
from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.servers import ServerProcess

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "In the beginning", "max_tokens": 400, "ignore_eos": True}


def test_a_taken_port_and_an_unknown_host_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            QsampleError, match=rf"port {port} \(Address already in use\); give another"
        ):
            run(ServeSettings(models={"tiny": "nowhere"}), port=port)
    with pytest.raises(
        QsampleError,
        match=r"cannot listen on no\.such\.host\.invalid, port 8000 \((?!Unknown error)",
    ):
        run(ServeSettings(models={"tiny": "nowhere"}), "no.such.host.invalid")


@pytest.mark.ci
def test_https(start_server: Callable[..., ServerProcess], tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-days",
        "1",
        *subject,
    ]
    subprocess.run(
        [*make, "-nodes", "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    with start_server(
        "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), trust=certificate
    ) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert (
            len(server.client.post(COMPLETIONS, json=LONG | {"max_tokens": 3}).json()["choices"])
            == 1
        )
    for keyfile, certfile, reason in (
        (key, None, "no certificate"), (certificate, certificate, "NO_START_LINE|no start line|PEM"),
        (key, tmp_path / "none", "No such file"),
    ):  # fmt: skip
        with pytest.raises(
            QsampleError, match=rf"cannot serve https with .*({reason}).*; give PEM files"
        ):
            run(
                ServeSettings(models={"tiny": "nowhere"}),
                ssl_keyfile=str(keyfile),
                ssl_certfile=None if certfile is None else str(certfile),
            )


def test_a_wrong_setting_is_wrong_usage() -> None:
    assert main(["serve", "nowhere", "--tool-call-parser", "foo"]) == 2


@pytest.mark.ci
def test_sigterm_lets_answers_end(
    start_server: Callable[..., ServerProcess], served_model: CausalLM
) -> None:
    body = {**LONG, "max_tokens": 300, "seed": 3, "stream": True}
    with start_server() as server:
        text, status = "", None
        with server.client.stream("POST", COMPLETIONS, json=body) as answer:
            for line in answer.iter_lines():
                if status is None:
                    server.process.send_signal(signal.SIGTERM)
                    status = True
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert server.process.wait(60) == 0
        assert "half-written" not in "".join(server.log)
    params = SamplingParams(max_new_tokens=300, eos_token_id=())
    output = served_model.generate("In the beginning", params, seed=3)
    assert output.texts is not None
    assert text == output.texts[0]


@pytest.mark.ci
def test_what_runs_after_the_drain_timeout_is_told_so(
    start_server: Callable[..., ServerProcess],
) -> None:
    with start_server("--slots", "1", "--drain-timeout", "0.2") as server:
        with server.client.stream(
            "POST", COMPLETIONS, json={**LONG, "n": 30, "stream": True}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line]
        assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "server_shutdown"
        assert told[-1] == "data: [DONE]"
        server.process.wait(60)
    assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize(
    ("host", "given", "allowed", "url"),
    [
        ("127.0.0.1", (), ("127.0.0.1",), "http://127.0.0.1:"), ("::1", (), ("::1",), "http://[::1]:"),
        ("0.0.0.0", (), (), "http://0.0.0.0:"), ("localhost", ("a",), ("a",), "http://localhost:"),
    ],
)  # fmt: skip
def test_what_uvicorn_is_told(
    host: str, given: tuple[str, ...], allowed: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "::1":
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    config, models, app, served = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    app.return_value.state.server.max_body_bytes.return_value = 77
    for name, stub in (("ServedModels", models), ("make_app", app)):
        monkeypatch.setattr(f"qsample.addons.serve.run.{name}", stub)
    monkeypatch.setattr(uvicorn, "Config", config)
    monkeypatch.setattr(uvicorn.Server, "run", served)
    settings = ServeSettings(models={"m": "p"}, drain_timeout=2.5, allowed_hosts=given)
    urls = list[str]()
    run(settings, host, 0, ready=urls.append, log_level="error")
    (listening,) = served.call_args.kwargs["sockets"]
    assert urls[0].startswith(url)
    assert int(urls[0].removeprefix(url)) > 0
    assert listening.fileno() == -1, "it is closed at the end"
    (used,) = models.call_args.args
    assert used == replace(settings, allowed_hosts=allowed)
    assert app.call_args == call(used, models.return_value)
    told = config.call_args.kwargs
    assert told["http"].limits.max_body_bytes == 77
    assert told["http"].limits.max_seconds == MAX_SECONDS_OF_A_REQUEST
    told["http"].limits.report_refusal(431, "headers_too_large")
    count = app.return_value.state.server.count_exchange
    count.assert_called_once_with("other", 431, "headers_too_large")
    fixed = {"ws": "none", "access_log": False, "server_header": False, "log_level": "error"}
    files = {"ssl_keyfile": None, "ssl_certfile": None, "timeout_graceful_shutdown": 3 + 5}
    assert {name: told[name] for name in (*fixed, *files)} == fixed | files
