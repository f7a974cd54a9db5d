"""Packages that an account signed at a sigstore of the test's own: verified without a network, and every forgery
refused."""

from __future__ import annotations

import base64
import datetime
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.addons.trust.signing import sign
from qsample.errors import PackageError, QsampleError
from qsample.package.package import read_package
from qsample.package.signature import SIGNATURE_NAME
from tests.helpers.command_line import qsample
from tests.helpers.small_packages import write

pytest.importorskip("model_signing")
from tests.helpers.signing_keys import key_pair
from tests.helpers.sigstore_service import SigstoreService, new_key

ACCOUNT = "you@example.org"
ISSUER = "https://accounts.example.org"
TRUSTED = f"sigstore:{ACCOUNT},{ISSUER}"
SERVICE = SigstoreService()
Bundle = dict[str, Any]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write(tmp_path / "package").path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return SERVICE.trust_config(tmp_path / "trust.json")


def statement_of(package: Path, folder: Path) -> bytes:
    """What model-signing signs of a package."""
    private, _ = key_pair(folder)
    sign(package, private_key=private, overwrite=True)
    envelope = json.loads((package / SIGNATURE_NAME).read_text())["dsseEnvelope"]
    return base64.b64decode(envelope["payload"])


def signed_by(package: Path, account: str = ACCOUNT, issuer: str = ISSUER, **options: Any) -> Path:
    statement = statement_of(package, package.with_name("keys"))
    bundle = SERVICE.signature(statement, account, issuer, **options)
    (package / SIGNATURE_NAME).write_text(json.dumps(bundle))
    return package


def read(package: Path, *trusted: str | Path) -> Any:
    return read_package(package, trusted_keys=trusted).signer


def test_an_account_is_verified_without_a_network(package: Path, config: Path) -> None:
    signed_by(package)
    signer = read(package, TRUSTED, config)
    assert signer.kind == "sigstore"
    another = key_pair(package.with_name("another"))[1]
    assert read(package, another, TRUSTED, config) == signer
    moved = shutil.move(package, package.with_name("renamed"))
    assert read(Path(moved), TRUSTED, str(config)) == signer


def test_a_signature_that_is_years_old_is_verified(package: Path, config: Path) -> None:
    began = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    assert read(signed_by(package, began=began), TRUSTED, config).kind == "sigstore"


@pytest.mark.parametrize(
    ("account", "issuer"),
    [
        ("other@example.org", ISSUER),
        ("you@example.org.evil.org", ISSUER),
        ("notyou@example.org", ISSUER),
        ("you@example.or", ISSUER),
        ("YOU@example.org", ISSUER),
        (ACCOUNT, "https://accounts.evil.org"),
        (ACCOUNT, ISSUER + "/"),
        (ACCOUNT, ISSUER[:-1]),
        (ACCOUNT, ""),
    ],
)
def test_other_accounts_and_issuers(account: str, issuer: str, package: Path, config: Path) -> None:
    signed_by(package, account, issuer)
    with pytest.raises(PackageError, match=r"not a valid signature by the sigstore .* do not"):
        read(package, TRUSTED, config)


@pytest.mark.parametrize("seconds", [-60, 601, 10**8])
def test_a_certificate_that_was_not_valid_when_it_signed(
    seconds: int, package: Path, config: Path
) -> None:
    signed_by(package, logged_after=seconds)
    with pytest.raises(PackageError, match="not a valid signature"):
        read(package, TRUSTED, config)


def entry(bundle: Bundle) -> Any:
    return bundle["verificationMaterial"]["tlogEntries"][0]


def without_proof(bundle: Bundle) -> None:
    del entry(bundle)["inclusionProof"]


def without_checkpoint(bundle: Bundle) -> None:
    del entry(bundle)["inclusionProof"]["checkpoint"]


def without_time(bundle: Bundle) -> None:
    del entry(bundle)["inclusionPromise"]


def without_entry(bundle: Bundle) -> None:
    bundle["verificationMaterial"]["tlogEntries"] = []


def with_another_entry(bundle: Bundle) -> None:
    """Of the same account, about something else."""
    other = SERVICE.signature(b"{}", ACCOUNT, ISSUER)
    bundle["verificationMaterial"]["tlogEntries"] = [entry(other)]


def with_another_time(bundle: Bundle) -> None:
    entry(bundle)["integratedTime"] = str(int(entry(bundle)["integratedTime"]) + 1)


def with_another_root(bundle: Bundle) -> None:
    entry(bundle)["inclusionProof"]["rootHash"] = base64.b64encode(bytes(32)).decode()


def with_a_certificate_of_a_stranger(bundle: Bundle) -> None:
    stranger = SigstoreService(
        certificate_log=SERVICE.certificate_log, signature_log=SERVICE.signature_log
    )
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    bundle |= stranger.signature(statement, ACCOUNT, ISSUER)


def with_a_certificate_of_no_log(bundle: Bundle) -> None:
    stranger = SigstoreService(authority=SERVICE.authority, signature_log=SERVICE.signature_log)
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    bundle |= stranger.signature(statement, ACCOUNT, ISSUER)


def with_another_payload(bundle: Bundle) -> None:
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"0", b"1", 1)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()


@pytest.mark.parametrize(
    "change",
    [
        without_proof,
        without_checkpoint,
        without_time,
        without_entry,
        with_another_entry,
        with_another_time,
        with_another_root,
        with_a_certificate_of_a_stranger,
        with_a_certificate_of_no_log,
        with_another_payload,
    ],
)
def test_forged_bundles(change: Callable[[Bundle], None], package: Path, config: Path) -> None:
    file = signed_by(package) / SIGNATURE_NAME
    bundle = json.loads(file.read_text())
    change(bundle)
    file.write_text(json.dumps(bundle))
    with pytest.raises(PackageError, match=r"do not use this package"):
        read(package, TRUSTED, config)


def test_another_log_and_another_package(package: Path, config: Path, tmp_path: Path) -> None:
    signed_by(package)
    other_log = SERVICE.trust_config(tmp_path / "other.json", signature_log=new_key())
    with pytest.raises(PackageError, match="not a valid signature"):
        read(package, TRUSTED, other_log)
    other = write(tmp_path / "other").path
    (other / "more.txt").write_text("x")
    shutil.copy(package / SIGNATURE_NAME, other)
    with pytest.raises(PackageError, match=r"'more\.txt' was added or removed since"):
        read(other, TRUSTED, config)


def test_an_account_needs_its_issuer(package: Path, config: Path) -> None:
    """The library takes an empty issuer for any."""
    signed_by(package, issuer="https://accounts.evil.org")
    wrong: tuple[tuple[str | Path, ...], ...] = (
        (f"sigstore:{ACCOUNT},", config),
        (f"sigstore:{ACCOUNT}", config),
        (f"sigstore:,{ISSUER}", config),
        ("sigstore:", config),
        (config,),
        (TRUSTED, config, config),
    )
    for trusted in wrong:
        with pytest.raises(ValueError, match=r"trusted_keys is .* one sigstore:ACCOUNT,ISSUER"):
            read(package, *trusted)


@pytest.mark.parametrize("content", ["", "[]", "{}", "{" * 10_000, '{"trustedRoot": 5}'])
def test_a_trust_configuration_that_is_none(content: str, package: Path, config: Path) -> None:
    config.write_text(content, encoding="utf-8")
    with pytest.raises(QsampleError, match=r"with which no sigstore can be verified .*\.json file"):
        read(signed_by(package), TRUSTED, config)


def test_keys_and_authorities_that_cannot_be_used(package: Path, tmp_path: Path) -> None:
    """The file of an authority that holds none, and a key of another curve than the signature names."""
    private, public = key_pair(tmp_path / "keys")
    sign(package, private_key=private)
    bundle = json.loads((package / SIGNATURE_NAME).read_text())
    material = {"certificates": [{"rawBytes": base64.b64encode(b"x").decode()}]}
    bundle["verificationMaterial"] = {"x509CertificateChain": material}
    (package / SIGNATURE_NAME).write_text(json.dumps(bundle))
    authority = tmp_path / "authority.pem"
    authority.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(QsampleError, match="no certificate can be verified"):
        read(package, authority)
    with pytest.raises(PackageError, match="which is not trusted"):
        read(package, public)


@pytest.mark.ci
def test_the_command_without_a_network(package: Path, config: Path) -> None:
    """The public service's root of trust cannot be fetched: the error says so, and what to do."""
    signed_by(package)
    proxy = {"HTTPS_PROXY": "http://127.0.0.1:9", "HOME": str(package.parent)}
    options = ("--trusted-keys", TRUSTED)
    refused = qsample("verify", package, *options, **proxy)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert re.search("connect to the network, or give the .json file", refused.stderr)
    verified = qsample("verify", package, *options, "--trusted-keys", config, **proxy)
    assert verified.returncode == 0, verified.stderr
    assert "sigstore sha256:" in verified.stdout + verified.stderr
