"""Writing a file whole or not at all, and whether it can be written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runtime.errors import InputError

_SUFFIX = ".tmp"
_LOOKED_AT = 65536  # bytes of a file's beginning
_ABANDONED_S = 60.0  # a write takes far less; what is older belonged to a process that was killed


def write_whole(path: Path, content: str | bytes) -> None:
    """Put ``content`` into ``path``: a reader sees the old file or the new one, whatever is killed when.

    A temporary file beside it, fsync, rename. A symbolic link stays one, and what it points to is replaced; the mode of a
    file that is there is kept. A temporary file that a killed process left is removed by the next write of the same file.
    Raises :class:`InputError` when the place cannot be written (no space, no permission, a directory); the old file is
    then as it was.
    """
    write_together({path: content})


def write_together(files: Mapping[Path, str | bytes]) -> None:
    """:func:`write_whole` for several files, none of which is replaced unless all of them could be written."""
    ready: list[tuple[Path, Path, Path]] = []
    try:
        for path, content in files.items():
            with _errors_named(path):
                target = _target(path)
                _sweep(target)
                temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_SUFFIX}")
                ready.append((path, temporary, target))
                _fill(temporary, target, content.encode() if isinstance(content, str) else content)
        for path, temporary, target in ready:
            with _errors_named(path):
                os.replace(temporary, target)
    except BaseException:
        for _, temporary, _ in ready:
            with contextlib.suppress(OSError):  # none was made, on a disk that is read-only
                temporary.unlink()
        raise
    for folder in {target.parent for _, _, target in ready}:
        _settle(folder)


def writable(option: str, path: Path) -> None:
    """Raises :class:`InputError` that names ``option`` when no file can be written at ``path``; before there is work to lose."""
    if os.path.isdir(path):
        raise InputError(f"{option}: {path} is a directory; name a file")
    if not os.path.isdir(path.parent):
        raise InputError(f"{option}: {path} cannot be written: there is no directory {path.parent}")
    refused = _refused(path.parent, os.W_OK | os.X_OK) or (_refused(path) if os.path.exists(path) else _no_name(path))
    if refused is not None:
        raise InputError(f"{option}: {path} cannot be written ({refused.strerror})")


def replaceable(option: str, path: Path, ours: Callable[[bytes], bool], otherwise: str) -> None:
    """Raises :class:`InputError` that names ``option`` when at ``path`` is a file that is not ``ours`` by its beginning.

    ``otherwise``: what such a file is, as in "is no profile". A file that cannot be read is not ours; one that is blank, or not
    there, nobody misses.
    """
    if not os.path.isfile(path):
        return
    try:
        with path.open("rb") as file:
            begin = file.read(_LOOKED_AT)
        known = not begin.strip() or ours(begin)
    except OSError:
        known = False
    if not known:
        raise InputError(f"{option}: {path} exists and {otherwise}; name another file")


def _no_name(path: Path) -> OSError | None:
    """Why nothing can be at ``path``, as where its name is too long; None: it may."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _refused(place: Path, mode: int = os.W_OK) -> OSError | None:
    """Why this process may not write to what is at ``place``: nobody may, or not this user; None: it may."""
    if os.access(place, mode):
        return None
    code = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
    return OSError(code, os.strerror(code))


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None


def _fill(temporary: Path, target: Path, data: bytes) -> None:
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as for any new file
    with os.fdopen(handle, "wb") as file:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _target(path: Path) -> Path:
    """The file that ``path`` leads to. Raises OSError when that is no place for a file."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir():
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    if target.exists() and (refused := _refused(target)) is not None:  # a rename would not ask
        raise refused
    return target


def _sweep(target: Path) -> None:
    """Remove what killed processes left of this file."""
    old = time.time() - _ABANDONED_S
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(f".{target.name}.") and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < old:
                        os.unlink(entry.path)


def _settle(folder: Path) -> None:
    """Make the rename survive a power cut, where the file system lets a directory be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
