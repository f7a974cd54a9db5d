"""`qsample sign` and `sbom`: who made a package, and of what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from qsample.addons.trust.signing import PASSWORD_VARIABLE
from qsample.addons.trust.signing import sign as make_signature
from qsample.cli.commands import CliCommand, Panel
from qsample.cli.terminal import note, progress
from qsample.errors import PackageError
from qsample.package.disk.replace import file_aside
from qsample.package.package import read_package
from qsample.package.signature import signer_of

SIGN_EXAMPLES: Final = (
    "[bold]Examples[/bold]\n\n"
    "openssl ecparam -genkey -name prime256v1 -noout -out key.pem\n\n"
    "openssl ec -in key.pem -pubout -out public.pem\n\n"
    "qsample sign qwen3-cpu --private-key key.pem\n\n"
    "qsample serve qwen3-cpu --trusted-keys public.pem"
)
SBOM_EXAMPLES: Final = "[bold]Examples[/bold]\n\nqsample sbom qwen3-cpu -o qwen3.cdx.json"


def sign(
    package: Annotated[
        Path,
        typer.Argument(metavar="PACKAGE", help="Package to sign, with all files in its folder."),
    ],
    private_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"PEM file of an elliptic curve; {PASSWORD_VARIABLE} has its password.",
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file: the key's certificate.")
    ] = None,
    certificate_chain: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="PEM files from its issuer on; may be repeated."),
    ] = None,
    sigstore: Annotated[
        bool,
        typer.Option(
            "--sigstore",
            help="Sign with an account, by sigstore's public service, in place of a key.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a signature.")] = False,
) -> None:
    """Sign a package with OpenSSF model signing: a key, a certificate, or an account. Writes
    model.sig into it."""
    if (private_key is None) != sigstore:
        raise typer.BadParameter("give either --private-key or --sigstore")
    if (certificate is None) != (certificate_chain is None) or (
        sigstore and certificate is not None
    ):
        raise typer.BadParameter(
            "--certificate and --certificate-chain go together, with --private-key"
        )
    with progress():
        folder = read_package(package).path
    typer.echo(
        str(
            make_signature(
                folder, private_key, certificate, certificate_chain or (), overwrite=overwrite
            )
        )
    )
    note(f"signed by the {signer_of(folder)}")


def sbom(
    package: Annotated[Path, typer.Argument(metavar="PACKAGE", help="Package to describe.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A new file. (default: stdout)"),
    ] = None,
) -> None:
    """Describe a package as an ML-BOM, a CycloneDX 1.6 document: files, origin, versions,
    licence."""
    from qsample.addons.trust.sbom import ml_bom

    with progress():
        document = json.dumps(ml_bom(read_package(package)), indent=2, ensure_ascii=False)
    if output is None:
        typer.echo(document)
        return
    if os.path.lexists(output):
        raise PackageError(f"{output} exists; give another file for the document")
    with file_aside(output) as aside:
        aside.write_text(document + "\n", encoding="utf-8")
    typer.echo(str(output))


SIGN: Final = CliCommand(sign, Panel.TRUST, SIGN_EXAMPLES)
SBOM: Final = CliCommand(sbom, Panel.TRUST, SBOM_EXAMPLES)
