"""What a server is started with, and what is refused before a port or a model is opened.

A server that others can reach has a key, or was told `--insecure`. Names a browser may use for it are loopback's, the
address that a client reached and `--allowed-host`'s: a page that rebinds its own name to one of these is turned away.
Guarded by tests/server/test_guards.py and tests/cli/test_serve.py.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from coli.errors import UsageError
from coli.kinds import Secret

BODY_LIMIT = 4 << 20  # bytes of a request's body
WILDCARDS = ("0.0.0.0", "::", "")
LIMITS = {"port": (0, 65535), "slots": (1, 16), "max_queue": (0, 4096), "checkpoints": (1, 256), "pins": (0, 256)}


@dataclass(frozen=True)
class ServeOptions:
    """`pins` turns' prefixes and `checkpoints` others are kept a slot; times are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_id: str | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 8
    queue_timeout: float = 300.0
    slots: int = 1
    checkpoints: int = 4
    pins: int = 2
    insecure: bool = False

    def check(self) -> None:
        """Raises UsageError for a value out of its range, and for an open door without a key."""
        for name, (low, high) in LIMITS.items():
            if not low <= getattr(self, name) <= high:
                raise UsageError(f"{getattr(self, name)} is out of range", _flag(name), f"give {low}..{high}")
        if not 0 < self.queue_timeout < 1e9:  # also refuses NaN
            raise UsageError(f"{self.queue_timeout} is out of range", "--queue-timeout", "give seconds above 0")
        model = self.model_id
        if model is not None and (not model or model != model.strip() or not model.isprintable()):
            raise UsageError("is empty, or has blanks around it or control characters in it", "--model-id")
        if self.api_key is not None:
            try:
                Secret().check(self.api_key)
            except ValueError:
                raise UsageError("the key is out of range", "--api-key", f"give {Secret.range}") from None
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != "*" and (not parts.scheme or not parts.netloc or parts.path or parts.query or parts.fragment):
                raise UsageError(f"{origin!r} is no origin", "--cors-origin", "give https://name, with its port if any")
        if not self.api_key and not self.insecure and not loopback(self.host):
            raise UsageError("others can reach this address and no key is asked of them", f"--host {self.host}",
                             "set --api-key or COLI_API_KEY, or give --insecure")  # fmt: skip

    @property
    def hosts(self) -> frozenset[str]:
        """Names besides loopback's and the IP address that a Host header may have; "*" is any."""
        own = () if self.host in WILDCARDS else (self.host,)
        return frozenset(name.lower().strip("[]") for name in (*own, *self.allowed_hosts))


def loopback(name: str) -> bool:
    """Whether only this machine can reach a host of this name."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
