"""Signed packages: `model.sig` has the sha256 of every other file of its folder, signed as OpenSSF model signing does.

The library `model-signing` makes and checks the signatures (https://github.com/ossf/model-signing-spec). To check one,
it gets the hashes that the manifest states, and reading compares these with the files: each file is hashed once.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from qsample.disk.replace import file_aside
from qsample.disk.untrusted import parse_json, read_json
from qsample.errors import PackageError, QsampleError, install_hint, shown

SIGNATURE_NAME: Final = "model.sig"
PASSWORD_VARIABLE: Final = "QSAMPLE_KEY_PASSWORD"
_ACCOUNT: Final = "sigstore:"
_LARGEST: Final = 1 << 24  # bytes; a file takes 150 of them
_OF_GIT: Final = (
    ".git",
    ".gitattributes",
    ".github",
    ".gitignore",
)  # which model-signing leaves out

# Files of public keys or of certificate authorities in PEM, folders of `.pem` files, or "sigstore:ACCOUNT,ISSUER".
TrustedKeys = str | Path | Sequence[str | Path]


class Signer(NamedTuple):
    """The maker of a signature by its own account: a "key", a "certificate" or "sigstore". fingerprint: sha256, in
    hexadecimal, of the public key in PEM, or of the certificate in DER."""

    kind: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.kind} sha256:{self.fingerprint}"


def sign(
    folder: Path,
    private_key: str | Path | None = None,
    certificate: str | Path | None = None,
    certificate_chain: Sequence[str | Path] = (),
    *,
    overwrite: bool = False,
) -> Path:
    """Sign the package in `folder`, which the caller has read, and return the path of the signature.

    Args:
        private_key: a PEM file, of an elliptic curve (P-256, P-384, P-521); the variable QSAMPLE_KEY_PASSWORD has its
            password. None signs by sigstore, which needs a network and asks for an account.
        certificate, certificate_chain: PEM files of the key's certificate, and from its issuer's on.
        overwrite: replace a signature.

    Raises PackageError if a key or certificate cannot be used, or the signature cannot be written.
    """
    library, path = _library(), folder / SIGNATURE_NAME
    if path.exists() and not overwrite:
        raise PackageError(f"{folder} is signed already; give overwrite to sign it anew")
    config, password = library.signing.Config(), os.environ.get(PASSWORD_VARIABLE)
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
    except Exception as error:  # of cryptography, OpenSSL, sigstore, the network and the disk
        raise PackageError(
            f"cannot sign {folder} with {private_key or 'sigstore'} ({_line(error)}); a key is a PEM file of an "
            f"elliptic curve (P-256, P-384, P-521), {PASSWORD_VARIABLE} has its password, and a certificate is the "
            "key's own, with its issuer's in the chain"
        ) from error
    return path


def signer_of(folder: Path) -> Signer | None:
    """Who signed the package in `folder`, by the signature's own account, unchecked; None without a signature. Raises
    PackageError if it is damaged."""
    found = _read(folder)
    return None if found is None else found[0]


def check_signature(folder: Path, hashes: Mapping[str, str], trusted_keys: TrustedKeys) -> Signer:
    """The trusted signer of the package in `folder`. hashes: name → sha256 of every file in `files_to_sign`. Raises
    PackageError without such a signature and for files that differ from those that were signed, ValueError or
    QsampleError for `trusted_keys` that are none."""
    found, path, library = _read(folder), folder / SIGNATURE_NAME, _library()
    keys, authorities, accounts = _read_keys(trusted_keys)
    if found is None:
        raise PackageError(
            f"{folder} is not signed: it has no {SIGNATURE_NAME}; leave trusted_keys out to take it so"
        )
    signer, signed = found
    config = library.verifying.Config().set_hashing_config(_known(library, hashes))
    if signer.kind == "key" and signer.fingerprint in keys:
        config.use_elliptic_key_verifier(public_key=keys[signer.fingerprint])
    elif signer.kind == "certificate" and authorities:
        config.use_certificate_verifier(certificate_chain=authorities)
    elif signer.kind == "sigstore" and accounts:
        config.use_sigstore_verifier(identity=accounts[0][0], oidc_issuer=accounts[0][1])
    else:
        raise PackageError(
            f"{path} is by the {signer}, which is not trusted; trusted_keys is {shown(trusted_keys)}"
        )
    try:
        config.verify(folder, path)
    except (
        Exception
    ) as error:  # ValueError for other files; InvalidSignature, errors of OpenSSL and of sigstore
        names = (
            {name for name, _ in signed.items() ^ hashes.items()}
            if isinstance(error, ValueError)
            else ()
        )
        problem = f"{SIGNATURE_NAME} is not a valid signature by the {signer} ({_line(error)})"
        if names:
            change = (
                "altered"
                if (name := min(names)) in signed and name in hashes
                else "added or removed"
            )
            problem = f"{name!r:.120} was {change} since the package was signed"
        raise PackageError(f"{folder}: {problem}; do not use this package") from error
    return signer


def files_to_sign(folder: Path) -> Iterator[str]:
    """The names of all files in `folder` but its signature and files of git. Raises PackageError for anything else."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] in (SIGNATURE_NAME, *_OF_GIT) or (
            path.is_dir() and not path.is_symlink()
        ):
            continue
        if not path.is_file():
            raise PackageError(f"{path} is not a plain file; a signed package has no other entries")
        yield name


def _library() -> Any:
    try:
        import model_signing
    except ModuleNotFoundError as error:
        raise QsampleError(
            f"signatures need {error.name}, which is not installed: `{install_hint('sign')}`"
        ) from error
    return model_signing


def _known(library: Any, hashes: Mapping[str, str]) -> Any:
    """A way of hashing for `library`: known hashes."""
    manifest = library.manifest

    class Known(library.hashing.Config):  # type: ignore[misc]
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            digests = {
                name: manifest.hashing.Digest("sha256", bytes.fromhex(one))
                for name, one in hashes.items()
            }
            items = [
                manifest.FileManifestItem(path=PurePosixPath(name), digest=one)
                for name, one in digests.items()
            ]
            return manifest.Manifest(Path(model_path).name, items, None)

    return Known()


def _read(folder: Path) -> tuple[Signer, dict[str, str]] | None:
    """The signer and the signed files, name → digest, of `folder`, unchecked; None without a signature."""
    path = folder / SIGNATURE_NAME
    try:
        bundle = read_json(path, _LARGEST)
        material, payload = (
            bundle["verificationMaterial"],
            base64.b64decode(bundle["dsseEnvelope"]["payload"]),
        )
        resources = parse_json(payload.decode())["predicate"]["resources"]
        signed = {str(entry["name"]): str(entry["digest"]) for entry in resources}
        if "publicKey" in material:
            return Signer("key", str(material["publicKey"]["hint"])), signed
        chain = material.get("x509CertificateChain")
        certificate = chain["certificates"][0] if chain else material["certificate"]
        fingerprint = hashlib.sha256(base64.b64decode(certificate["rawBytes"])).hexdigest()
        return Signer("certificate" if chain else "sigstore", fingerprint), signed
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PackageError(
            f"{path} is no signature of model-signing 1.0 or newer ({_line(error)}); sign the package again"
        ) from error


def _read_keys(trusted: TrustedKeys) -> tuple[dict[str, Path], list[Path], list[list[str]]]:
    """Files of public keys by fingerprint, files of certificates, and accounts with their issuers."""
    from cryptography.hazmat.primitives import serialization

    given = [trusted] if isinstance(trusted, str | Path) else list(trusted)
    accounts = [
        str(one).removeprefix(_ACCOUNT).split(",", 1)
        for one in given
        if str(one).startswith(_ACCOUNT)
    ]
    if not given or any(len(account) < 2 for account in accounts) or len(accounts) > 1:
        raise ValueError(
            f"trusted_keys is {shown(trusted)}; give PEM files, folders, or one {_ACCOUNT}ACCOUNT,ISSUER"
        )
    keys: dict[str, Path] = {}
    authorities: list[Path] = []
    for place in (Path(one) for one in given if not str(one).startswith(_ACCOUNT)):
        for path in sorted(place.glob("*.pem")) if place.is_dir() else [place]:
            try:
                text = path.read_bytes()
                if b"-----BEGIN CERTIFICATE-----" in text:
                    authorities.append(path)
                    continue
                pem = serialization.load_pem_public_key(text).public_bytes(
                    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
                )
            except (OSError, ValueError) as error:
                raise QsampleError(
                    f"trusted_keys: cannot read {path} ({_line(error)}); give a public key or a certificate as PEM"
                ) from error
            keys[hashlib.sha256(pem).hexdigest()] = path
    return keys, authorities, accounts


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())!s:.200}"
