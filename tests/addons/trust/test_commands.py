"""`qsample sign`, `verify` of hashes and signatures, `sbom`, and --trusted-keys of the commands that run packages."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qsample
from qsample.addons.serve.models import ServedModels
from qsample.addons.serve.settings import ServeSettings
from qsample.addons.trust.signing import sign
from qsample.errors import PackageError, QsampleError
from qsample.ort import session as session_module
from qsample.package.package import Package, read_package
from qsample.runtime import load
from tests.helpers.flags import unlike
from tests.helpers.small_packages import write

pytest.importorskip("model_signing")
from tests.helpers.signing_keys import key_pair


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path / "keys")


def test_sign_and_verify(run: Any, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    folder = write(tmp_path / "package").path
    assert (
        run("verify", folder)[1]
        == f"{folder}: 5 files have the sha256 of the manifest; not signed\n"
    )
    status, out, err = run("verify", folder, "--trusted-keys", public)
    assert (status, out) == (1, "")
    assert "is not signed" in err
    status, out, err = run("sign", folder, "--private-key", private)
    assert (status, out) == (0, f"{folder / 'model.sig'}\n")
    _, out, _ = run("verify", folder)
    assert "signed by the key sha256:" in out
    assert "--trusted-keys checks that" in out
    assert "signed by the trusted key" in run("verify", folder, "--trusted-keys", public)[1]
    for given, trusted in (((), False), (("--trusted-keys", public.parent), True)):
        document = json.loads(run("verify", folder, "--json", *given)[1])
        assert (document["signature"]["kind"], document["signature"]["trusted"]) == ("key", trusted)
    (folder / "decoder.onnx.data").write_bytes(b"x" * (folder / "decoder.onnx.data").stat().st_size)
    for given in ((), ("--trusted-keys", public)):
        status, _, err = run("verify", folder, *given)
        assert status == 1
        assert "decoder.onnx.data was altered" in err


def test_wrong_usage(run: Any, keys: tuple[Path, Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    for arguments, message in (
        (("sign", folder), "either --private-key or --sigstore"),
        (
            ("sign", folder, "--sigstore", "--private-key", keys[0]),
            "either --private-key or --sigstore",
        ),
        (
            ("sign", folder, "--private-key", keys[0], "--certificate", keys[1]),
            "--certificate-chain go together",
        ),
        (("verify", folder, "--max-mean", "1"), "go with --against"),
        (
            ("generate", "a-model", "--trusted-keys", keys[1], "-p", "x"),
            "--trusted-keys is for packages",
        ),
    ):
        status, _, err = run(*arguments)
        assert status == 2, err
        assert message in err


def test_sbom(run: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    status, out, _ = run("sbom", folder)
    assert status == 0
    assert json.loads(out)["metadata"]["component"]["type"] == "machine-learning-model"
    assert run("sbom", folder, "-o", tmp_path / "bom.json")[1] == f"{tmp_path / 'bom.json'}\n"
    assert (tmp_path / "bom.json").read_text() == out
    assert run("sbom", folder, "-o", tmp_path / "bom.json")[0] == 1, "a file that exists"


def test_nothing_of_an_untrusted_package_runs(
    run: Any,
    fake: Callable[..., Package],
    keys: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private, public = keys
    folder = tmp_path / "package"
    shutil.copytree(fake().path, folder)
    sign(folder, private_key=private)
    model = load(folder, trusted_keys=[public])
    again = pickle.loads(pickle.dumps(model))
    assert again.package == model.package
    assert (
        run("generate", folder, "-p", "a", "--max-new-tokens", 2, "--trusted-keys", public)[0] == 0
    )
    opened = qsample.AutoModelForCausalLM.from_pretrained(folder, trusted_keys=[public])
    ServedModels(ServeSettings(models={"a": str(folder)}, trusted_keys=(str(public),))).close()

    another = key_pair(tmp_path / "another")[1]
    content = (folder / "tokenizer.json").read_bytes()
    monkeypatch.setattr(
        session_module, "open_session", lambda *_, **__: pytest.fail("a graph was opened")
    )
    for damage, trusted, message in (
        (b" ", public, "tokenizer.json"),
        (b"", another, "not trusted"),
    ):
        (folder / "tokenizer.json").write_bytes(content + damage)
        for refused in (
            lambda trusted=trusted: load(folder, trusted_keys=trusted, verify=False),
            lambda trusted=trusted: qsample.AutoModelForCausalLM.from_pretrained(
                folder, trusted_keys=[trusted]
            ),
            lambda trusted=trusted: ServedModels(
                ServeSettings(models={"a": str(folder)}, trusted_keys=(str(trusted),))
            ),
        ):
            with pytest.raises(PackageError, match=message):
                refused()
        for command in (("generate", folder, "-p", "a"), ("serve", folder, "--port", 0)):
            status, _, err = run(*command, "--trusted-keys", trusted)
            assert status == 1, err
            assert message in err
    # After the opening, before the first call.
    (folder / "tokenizer.json").write_bytes(content + b" ")
    with pytest.raises(PackageError, match=r"tokenizer\.json"):
        opened.generate([[5]], max_new_tokens=1)
    with pytest.raises(PackageError, match=r"tokenizer\.json"):
        pickle.loads(pickle.dumps(model))
    (folder / "tokenizer.json").write_bytes(content)
    assert read_package(folder, trusted_keys=public).signer is not None
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(QsampleError, match="only packages are signed"):
        qsample.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", trusted_keys=public)


def test_the_flags() -> None:
    assert unlike("package PACKAGE required; --output/-o FILE", "sbom") == []
    own = "package PACKAGE required; --private-key FILE; --certificate FILE; --certificate-chain FILE repeated"
    assert unlike(f"{own}; --sigstore; --overwrite", "sign") == []
