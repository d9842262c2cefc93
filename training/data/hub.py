"""The Hugging Face hub where there may be no network."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies


def reachable(endpoint: str, timeout_s: float = 5.0) -> bool:
    """Whether the hub answers at all. Behind a proxy this cannot be asked cheaply: True."""
    if getproxies():
        return True
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Use what is in the hub's cache when the hub cannot be reached, without a minute of retries.

    The libraries try each file five times over with growing pauses, and warn each time; their
    offline mode looks into the cache at once.
    """
    import datasets.config
    from huggingface_hub import constants
    from huggingface_hub.utils import logging as hub_logging

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    verbosity = hub_logging.get_verbosity()
    if not any(before) and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
        hub_logging.set_verbosity(verbosity)


def download(name: str, file: str, beside: Sequence[str] = ()) -> Path | None:
    """A file of a hub repository, with those of `beside` that it has, in the cache; None where the
    repository has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError

    try:
        path = Path(hf_hub_download(name, file))
    except EntryNotFoundError:
        return None
    for side in beside:
        with contextlib.suppress(EntryNotFoundError):
            hf_hub_download(name, side, revision=path.parent.name)
    return path
