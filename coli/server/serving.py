"""A server's life: the port first, then the model, then requests, until a signal and the last answer.

    listen      the socket is bound before anything is loaded: a port in use is known at once, and probes see `loading`
    load        on a thread of its own, while uvicorn already answers
    serve       until SIGTERM or SIGINT
    drain       new requests are 503 with Retry-After, running and queued ones are answered to their end
    leave       what was learned is saved; the exit code is 0

A second signal ends the process at once, also when the loop has ended, and so does the first one while the model
loads, when there is nothing to answer or to save: exit codes 143 and 130. uvicorn's own handlers would break off
streams, so they are not installed.
A thread that still makes a prompt or a grammar is not waited for, nor can it be stopped: `run` says that there is one,
and the process has to leave by os._exit.
A signal that the parent set to be ignored stays ignored (nohup).
HTTP is h11's (coli/server/reader.py): httptools sets no limit to headers, and saves 60 us a request where a stream has
a piece every 20 ms.
Guarded by tests/server/test_serve.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from coli.errors import ColiError, Exit, UsageError
from coli.server.app import make_app
from coli.server.options import ServeOptions
from coli.server.reader import Reader
from coli.server.service import Service

EXITS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}
BACKLOG = 128
KEEP_ALIVE_S = 60  # an idle connection is kept this long: clients pool them
WATCH_S = 1  # between two looks whether the engine's thread is there
SLOW_READERS_S = 10  # after the last answer, clients that do not take theirs are left


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one. Raises UsageError."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                                             flags=socket.AI_PASSIVE)[0]  # fmt: skip
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"no address of this machine: {error}", where, "give a name or an address it has") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(error, port, where) from None
    return listener


def _refused(error: OSError, port: int, where: str) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"port {port} is in use", where, "give another --port; 0 takes a free one")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"port {port} is not permitted", where, "give a --port above 1023")
    return UsageError(f"cannot listen on port {port}: {error.strerror}", where, "give an address this machine has")


def url(listener: socket.socket) -> str:
    """What a client on this machine calls the server, without a path."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run(options: ServeOptions, load: Callable[[], Service], on_ready: Callable[[Service, str], None],
        say: Callable[[str], None]) -> bool:  # fmt: skip
    """Serve until a signal. `load` opens the model, on another thread; `on_ready` is given the service and its URL.
    Returns whether a thread is still busy for a client that is gone, and would keep the process from ending.

    Raises what `load` raises, and UsageError where the port cannot be had; leaves the process at a second signal."""
    options.check()
    with contextlib.closing(listen(options.host, options.port)) as listener:
        workers = _Workers()
        asyncio.run(_serve(options, listener, load, on_ready, say, workers))
        return workers.busy


async def _serve(options: ServeOptions, listener: socket.socket, load: Callable[[], Service],
                 on_ready: Callable[[Service, str], None], say: Callable[[str], None],
                 workers: _Workers) -> None:  # fmt: skip
    asyncio.get_running_loop().set_default_executor(workers)
    app = make_app(options, say=say)
    config = uvicorn.Config(
        app, http=Reader, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        proxy_headers=False, server_header=False, backlog=BACKLOG, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SLOW_READERS_S,
    )  # fmt: skip
    server = _Server(config)
    stop = asyncio.Event()
    with _signals(asyncio.get_running_loop(), stop, lambda: app.state.service is not None):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            service = await _loaded(load)
            app.state.service = service
            try:
                on_ready(service, url(listener))
                await _first(stop.wait(), serving, _watch(service))
                say(f"[coli serve] stopping: {service.scheduler.running} running, {service.scheduler.waiting} waiting")
                await service.drain()
            finally:
                for note in service.close():
                    say(note)
        finally:
            server.should_exit = True
            await serving


class _Workers(ThreadPoolExecutor):
    """The threads of asyncio.to_thread; nobody waits for them at the end."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="coli-work")
        self._open: set[Future[Any]] = set()

    def submit(self, *work: Any, **options: Any) -> Future[Any]:
        future = super().submit(*work, **options)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)

    @property
    def busy(self) -> bool:
        return bool(self._open)


class _Server(uvicorn.Server):
    """Without handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _loaded(load: Callable[[], Service]) -> Service:
    """What `load` returns, from a thread; the loop answers probes meanwhile."""
    with ThreadPoolExecutor(1, "coli-load") as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, load)


async def _watch(service: Service) -> None:
    """Raises ColiError when the engine's thread is gone: a server that can only refuse must not look alive."""
    while not service.scheduler.over:
        await asyncio.sleep(WATCH_S)
    raise ColiError("the engine's thread has ended: a fault of coli", "coli serve", "start it again")


async def _first(*awaited: Any) -> None:
    """Returns when one of them has ended; raises what it raised. What is no task of its own ends with it."""
    tasks = [asyncio.ensure_future(each) for each in awaited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task, each in zip(tasks, awaited, strict=True):
            if task is not each:
                task.cancel()


@contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, loaded: Callable[[], bool]) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; a second one, or one before the model is loaded, ends the process.
    That stays so after this is left: the process is going."""

    def heard(number: signal.Signals) -> None:
        if stop.is_set() or not loaded():
            os._exit(EXITS[number])
        stop.set()
        for each in mine:  # beside the loop's own, which would wait until the loop turns
            signal.signal(each, _leave)

    before = {number: signal.getsignal(number) for number in EXITS}
    mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in mine:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number in mine:
            loop.remove_signal_handler(number)
            signal.signal(number, _leave if stop.is_set() else before[number])


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(EXITS[signal.Signals(number)])
