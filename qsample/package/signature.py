"""Signatures of packages: `model.sig` has the sha256 of every other file of its folder, as OpenSSF
model signing does.

The library `model-signing` checks the signatures (https://github.com/ossf/model-signing-spec). It
gets the hashes that the manifest states, and reading compares these with the files, so each file is
hashed once. `addons.trust.signing` makes signatures.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from qsample.checks import as_path
from qsample.errors import PackageError, QsampleError, install_hint, shown
from qsample.package.disk.untrusted import parse_json, read_json

SIGNATURE_NAME: Final = "model.sig"
_SIGSTORE_PREFIX: Final = "sigstore:"
_TRUST_CONFIG_SUFFIX: Final = ".json"
# What to do if trusted keys cannot be used, by the kind of the signer.
_REMEDIES: Final = {
    "key": "give a public key of P-256, P-384 or P-521 as PEM",
    "certificate": "give the certificates of authorities as PEM",
    "sigstore": "the root of trust of sigstore's public service is fetched from tuf-repo-cdn.sigstore.dev: connect "
    "to the network, or give the .json file of a trust configuration, too",
}
# A signature has about 150 bytes for each file.
_MAX_SIGNATURE_BYTES: Final = 1 << 24
# The library leaves these out of a signature.
_GIT_NAMES: Final = (".git", ".gitattributes", ".github", ".gitignore")

# Files of public keys or of certificate authorities in PEM, folders of `.pem` files,
# "sigstore:ACCOUNT,ISSUER", or with that the `.json` file of a sigstore's trust configuration.
TrustedKeys = str | Path | Sequence[str | Path]


class Signer(NamedTuple):
    """The maker of a signature, as the signature itself names it.

    Attributes:
        kind: "key", "certificate" or "sigstore".
        fingerprint: The sha256, in hexadecimal, of the public key in PEM, or of the certificate in
            DER.
    """

    kind: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.kind} sha256:{self.fingerprint}"


@dataclass(frozen=True, slots=True)
class _Signature:
    """A signature as it was read, unchecked.

    Attributes:
        signer: Its maker.
        digests: The sha256 of each signed file by name, in hexadecimal.
    """

    signer: Signer
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Trusted:
    """The signers that a caller trusts.

    Attributes:
        keys: The files of public keys by fingerprint.
        authorities: The files of certificates of authorities.
        account: The account at sigstore and its issuer, if any.
        trust_config: The file of the trust configuration of the account's sigstore; None for the
            public service's, which is fetched.
    """

    keys: Mapping[str, Path]
    authorities: Sequence[Path]
    account: tuple[str, str] | None
    trust_config: Path | None

    @classmethod
    def of(cls, trusted: TrustedKeys) -> _Trusted:
        """Read the keys and certificates. Raises ValueError or QsampleError for anything else."""
        given = [trusted] if isinstance(trusted, str | Path) else list(trusted)
        for item in given:
            as_path("trusted_keys", item)
        accounts = list[tuple[str, str]]()
        files = list[str]()
        for text in map(str, given):
            if text.startswith(_SIGSTORE_PREFIX):
                name, _, issuer = text.removeprefix(_SIGSTORE_PREFIX).partition(",")
                accounts.append((name, issuer))
            else:
                files.append(text)
        trust_configs = [Path(text) for text in files if text.endswith(_TRUST_CONFIG_SUFFIX)]
        # The library would accept every issuer in place of an empty one.
        is_incomplete = any(name == "" or issuer == "" for name, issuer in accounts)
        if not given or is_incomplete or len(accounts) > 1 or len(trust_configs) > len(accounts):
            raise ValueError(
                f"trusted_keys is {shown(trusted)}; give PEM files, folders, or one {_SIGSTORE_PREFIX}ACCOUNT,ISSUER "
                f"and with that at most one {_TRUST_CONFIG_SUFFIX} file, the trust configuration of its sigstore"
            )
        account = accounts[0] if accounts else None
        trust_config = trust_configs[0] if trust_configs else None
        keys = dict[str, Path]()
        authorities = list[Path]()
        for path in _pem_files(text for text in files if not text.endswith(_TRUST_CONFIG_SUFFIX)):
            fingerprint = _fingerprint(path)
            if fingerprint is None:
                authorities.append(path)
            else:
                keys[fingerprint] = path
        return cls(keys, authorities, account, trust_config)


def _fingerprint(path: Path) -> str | None:
    """The fingerprint of the public key in a PEM file; None if the file has certificates."""
    from cryptography.hazmat.primitives import serialization

    try:
        text = path.read_bytes()
        if b"-----BEGIN CERTIFICATE-----" in text:
            return None
        pem = serialization.load_pem_public_key(text).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    except (OSError, ValueError) as error:
        raise QsampleError(
            f"trusted_keys: cannot read {path} ({error_line(error)}); give a public key or a certificate as PEM"
        ) from error
    return hashlib.sha256(pem).hexdigest()


def _pem_files(places: Iterable[str]) -> Iterator[Path]:
    """The given files, and the `.pem` files in the given folders."""
    for place in map(Path, places):
        if place.is_dir():
            yield from sorted(place.glob("*.pem"))
        else:
            yield place


def signer_of(folder: Path) -> Signer | None:
    """The signer of the package in a folder, unchecked, as the signature names it; None without a
    signature.

    Raises PackageError if the signature is damaged.
    """
    signature = _read(folder)
    return None if signature is None else signature.signer


def signed_hashes(folder: Path) -> Mapping[str, str]:
    """The sha256 of each signed file of the package in a folder, unchecked, in hexadecimal by name;
    {} without a signature.

    Raises PackageError if the signature is damaged.
    """
    signature = _read(folder)
    return {} if signature is None else signature.digests


def check_signature(folder: Path, hashes: Mapping[str, str], trusted_keys: TrustedKeys) -> Signer:
    """Check the signature of the package in a folder.

    Args:
        folder: The folder of the package.
        hashes: The sha256, in hexadecimal, of every file in `files_to_sign` by name.
        trusted_keys: The keys, authorities or account that the caller trusts.

    Returns:
        The trusted signer.

    Raises:
        PackageError: There is no such signature, or files differ from the files that were signed.
        QsampleError: A file in `trusted_keys` cannot be read, or the library is not installed.
        ValueError: `trusted_keys` names nothing that can be trusted.
    """
    signature = _read(folder)
    library = signing_library()
    trusted = _Trusted.of(trusted_keys)
    if signature is None:
        raise PackageError(
            f"{folder} is not signed: it has no {SIGNATURE_NAME}; leave trusted_keys out to take it so"
        )
    path = folder / SIGNATURE_NAME
    signer = signature.signer
    config = library.verifying.Config().set_hashing_config(_known_hashes(library, hashes))
    if signer.kind == "key" and signer.fingerprint in trusted.keys:
        key = trusted.keys[signer.fingerprint]
        use_verifier = partial(config.use_elliptic_key_verifier, public_key=key)
    elif signer.kind == "certificate" and trusted.authorities:
        chain = trusted.authorities
        use_verifier = partial(config.use_certificate_verifier, certificate_chain=chain)
    elif signer.kind == "sigstore" and trusted.account is not None:
        account, issuer = trusted.account
        use_verifier = partial(
            config.use_sigstore_verifier,
            identity=account,
            oidc_issuer=issuer,
            trust_config=trusted.trust_config,
        )
    else:
        raise PackageError(
            f"{path} is by the {signer}, which is not trusted; trusted_keys is {shown(trusted_keys)}"
        )
    try:
        use_verifier()
    except (
        Exception
    ) as error:  # The library, OpenSSL, sigstore and the network have their own errors.
        raise QsampleError(
            f"trusted_keys is {shown(trusted_keys)}, with which no {signer.kind} can be verified "
            f"({error_line(error)}); {_REMEDIES[signer.kind]}"
        ) from error
    try:
        config.verify(folder, path)
    except Exception as error:  # The library, OpenSSL and sigstore have their own errors.
        # The library raises ValueError if files differ.
        change = _first_change(signature, hashes) if isinstance(error, ValueError) else None
        invalid = f"{SIGNATURE_NAME} is not a valid signature by the {signer} ({error_line(error)})"
        raise PackageError(
            f"{folder}: {invalid if change is None else change}; do not use this package"
        ) from error
    return signer


def _first_change(signature: _Signature, hashes: Mapping[str, str]) -> str | None:
    """How the first file in alphabetical order differs from the file that was signed; None if no
    file differs."""
    names = {name for name, _ in signature.digests.items() ^ hashes.items()}
    if not names:
        return None
    name = min(names)
    in_both = name in signature.digests and name in hashes
    change = "altered" if in_both else "added or removed"
    return f"{name!r:.120} was {change} since the package was signed"


def files_to_sign(folder: Path) -> Iterator[str]:
    """The names of all files in a folder except for its signature and git's files.

    Raises PackageError for entries that are neither files nor folders.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_left_out = name.partition("/")[0] in (SIGNATURE_NAME, *_GIT_NAMES)
        if is_left_out or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.is_file():
            raise PackageError(f"{path} is not a plain file; a signed package has no other entries")
        yield name


def signing_library() -> Any:
    """The module `model_signing`. Raises QsampleError, with a hint, if it or a part of it is not
    installed."""
    try:
        import model_signing
    except ModuleNotFoundError as error:
        raise QsampleError(
            f"signatures need {error.name}, which is not installed: `{install_hint('sign')}`"
        ) from error
    return model_signing


def _known_hashes(library: Any, hashes: Mapping[str, str]) -> Any:
    """A hashing configuration for the library that returns known hashes."""
    manifest = library.manifest
    items = []
    for name, digest in hashes.items():
        known = manifest.hashing.Digest("sha256", bytes.fromhex(digest))
        items.append(manifest.FileManifestItem(path=PurePosixPath(name), digest=known))

    class KnownHashes(library.hashing.Config):  # type: ignore[misc]
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            return manifest.Manifest(Path(model_path).name, items, None)

    return KnownHashes()


def _read(folder: Path) -> _Signature | None:
    """Read the signature in a folder; None if there is none. Raises PackageError if it is
    damaged."""
    path = folder / SIGNATURE_NAME
    try:
        bundle = read_json(path, _MAX_SIGNATURE_BYTES)
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
        resources = parse_json(payload.decode())["predicate"]["resources"]
        digests = {str(entry["name"]): str(entry["digest"]) for entry in resources}
        return _Signature(_signer_in(bundle["verificationMaterial"]), digests)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PackageError(
            f"{path} is no signature of model-signing 1.0 or newer ({error_line(error)}); sign the package again"
        ) from error


def _signer_in(material: Any) -> Signer:
    """The signer that the verification material of a signature names."""
    if "publicKey" in material:
        return Signer("key", str(material["publicKey"]["hint"]))
    chain = material.get("x509CertificateChain")
    certificate = chain["certificates"][0] if chain else material["certificate"]
    fingerprint = hashlib.sha256(base64.b64decode(certificate["rawBytes"])).hexdigest()
    return Signer("certificate" if chain else "sigstore", fingerprint)


def error_line(error: Exception) -> str:
    """The type and the text of an error of any library and of its cause, in one line of limited
    length."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())!s:.200}"
    cause = error.__cause__
    return f"{line}; {error_line(cause)}" if isinstance(cause, Exception) else line
