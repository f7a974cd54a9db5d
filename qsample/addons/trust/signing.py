"""Signs packages: writes `model.sig`, which `package.signature` checks when a package is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from qsample.errors import PackageError
from qsample.package.disk.replace import file_aside
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
    library = signing_library()
    path = folder / SIGNATURE_NAME
    if path.exists() and not overwrite:
        raise PackageError(f"{folder} is signed already; give overwrite to sign it anew")
    password = os.environ.get(PASSWORD_VARIABLE)
    config = library.signing.Config()
    config.set_hashing_config(library.hashing.Config().set_ignored_paths(paths=[SIGNATURE_NAME]))
    try:
        if private_key is None:
            config.use_sigstore_signer(use_ambient_credentials=True)
        elif certificate is None:
            config.use_elliptic_key_signer(
                private_key=private_key, password=password.encode() if password else None
            )
        else:
            config.use_certificate_signer(
                private_key=private_key,
                signing_certificate=certificate,
                certificate_chain=certificate_chain,
            )
        with file_aside(path) as aside:
            config.sign(folder, aside)
    except (
        Exception
    ) as error:  # cryptography, OpenSSL, sigstore, the network and the disk have their own errors.
        remedy = (
            f"a key is a PEM file of an elliptic curve (P-256, P-384, P-521), {PASSWORD_VARIABLE} has its password, "
            "and a certificate is the key's own, with its issuer's in the chain"
        )
        if private_key is None:
            remedy = "sigstore needs a network and an account; connect to the network, or sign with a key"
        raise PackageError(
            f"cannot sign {folder} with {private_key or 'sigstore'} ({error_line(error)}); {remedy}"
        ) from error
    return path
