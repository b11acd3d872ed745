"""``knowable sign`` and ``knowable verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.messages import plain_errors
from knowable.interfaces.cli.options import Config, Quiet

_Artifact = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run, or a saved posterior or certificate: a folder or a single file.")
]


def sign(
    run: _Artifact,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Private key (Ed25519) in PEM, without a password.")],
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Sign a run: whoever has the public key can tell that not a byte changed since.

    Make a pair of keys with: openssl genpkey -algorithm ed25519 -out key.pem, and: openssl pkey -in key.pem -pubout
    -out pub.pem. The private key stays with you.
    """
    with plain_errors():
        from knowable.core.storage.signing import sign as sign_artifact

        sign_artifact(run, key)
        if not quiet:
            typer.echo(f"Signed: {run}")


def verify(
    run: _Artifact,
    key: Annotated[Path, typer.Option(metavar="FILE", help="Public key (Ed25519) in PEM.")],
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Check that the owner of a key signed a run, and that none of its files was altered, added or removed since."""
    with plain_errors():
        from knowable.core.storage.signing import verify as verify_artifact

        files = verify_artifact(run, key)
        if not quiet:
            typer.echo(f"{run}: {len(files)} files, all as they were signed.")
