"""Signs packages: writes `model.sig`, which `package.signature` checks when a package is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from qsample.checks import as_path
from qsample.errors import PackageError
from qsample.package.disk.replace import file_aside
from qsample.package.disk.space import full_disk_named
from qsample.package.signature import SIGNATURE_NAME, error_line, signing_library

PASSWORD_VARIABLE: Final = "QSAMPLE_KEY_PASSWORD"


def sign(
    folder: Path,
    private_key: str | Path | None = None,
    certificate: str | Path | None = None,
    certificate_chain: Sequence[str | Path] = (),
    *,
    overwrite: bool = False,
) -> Path:
    """Sign the package in a folder, which the caller has read, with OpenSSF model signing.

    Args:
        folder: The folder of the package.
        private_key: A PEM file of an elliptic curve (P-256, P-384, P-521); the environment variable
            QSAMPLE_KEY_PASSWORD has its password. None signs with an account at sigstore, which
            needs a network and asks for the account.
        certificate: A PEM file with the key's certificate.
        certificate_chain: PEM files with the certificates from the issuer's on.
        overwrite: Whether an existing signature is replaced.

    Returns:
        The path of the signature.

    Raises:
        PackageError: A key or a certificate cannot be used, or the signature cannot be written.
        QsampleError: The library `model-signing` is not installed.
    """
    for name, given in (("private_key", private_key), ("certificate", certificate)):
        if given is not None:
            as_path(name, given)
    for given in certificate_chain:
        as_path("certificate_chain", given)
    library = signing_library()
    path = folder / SIGNATURE_NAME
    if path.exists() and not overwrite:
        raise PackageError(f"{folder} is signed already; give overwrite to sign it anew")
    config = library.signing.Config()
    with _key_errors(folder, private_key):
        _use_signer(config, private_key, certificate, certificate_chain)
    try:
        with file_aside(path, _scratch_place(folder)) as aside:
            ignored = [SIGNATURE_NAME, aside.parent.parent]
            config.set_hashing_config(library.hashing.Config().set_ignored_paths(paths=ignored))
            with _key_errors(folder, private_key), full_disk_named(folder):
                config.sign(folder, aside)
    except OSError as error:
        raise PackageError(
            f"cannot write {path}: {error.strerror}; the package is as it was"
        ) from error
    return path


def _use_signer(
    config: Any,
    private_key: str | Path | None,
    certificate: str | Path | None,
    certificate_chain: Sequence[str | Path],
) -> None:
    """Choose how to sign; see `sign`. config: The library's configuration."""
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if private_key is None:
        config.use_sigstore_signer(use_ambient_credentials=True)
    elif certificate is None:
        config.use_elliptic_key_signer(
            private_key=private_key, password=password.encode() if password != "" else None
        )
    else:
        config.use_certificate_signer(
            private_key=private_key,
            signing_certificate=certificate,
            certificate_chain=certificate_chain,
        )


@contextmanager
def _key_errors(folder: Path, private_key: str | Path | None) -> Iterator[None]:
    """Explain the keys if the library refuses them."""
    try:
        yield
    except PackageError:
        raise
    # cryptography, OpenSSL, sigstore and the network have their own errors.
    except Exception as error:
        signer: str | Path = "sigstore"
        remedy = "it needs a network and an account; connect to the network, or sign with a key"
        if private_key is not None:
            signer = private_key
            remedy = (
                f"a key is a PEM file of an elliptic curve (P-256, P-384, P-521), {PASSWORD_VARIABLE} has its "
                "password, and a certificate is the key's own, with its issuer's in the chain"
            )
        raise PackageError(
            f"cannot sign {folder} with {signer} ({error_line(error)}); {remedy}"
        ) from error


def _scratch_place(folder: Path) -> Path:
    """The folder for the scratch folder of a signature: outside of the package, if possible, whose
    signature the remains of a killed process would break."""
    parent = folder.parent
    is_usable = os.access(parent, os.W_OK) and parent.stat().st_dev == folder.stat().st_dev
    return parent if is_usable else folder
