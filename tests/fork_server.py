"""Start `python -m pensieve...` in tests by forking a process that has imported torch and transformers.

These imports take 5 seconds of CPU time, and a test run starts several hundred processes. `install` replaces
`subprocess.Popen` by a class that forks where possible, and executes otherwise:

    tests' process ── start, wait, children ──▶ server ── fork ──▶ pensieve serve
                                                  ▲                      │
                                                  └─ start (its engine) ─┘

A forked process has its own arguments, environment, folder, descriptors, signals, limits, process group and
exit code, like an executed process. Two things differ. Its parent is the server, so use `children_of` instead
of `ps --ppid` to find the children of a process. Its `/proc/PID/cmdline` is the server's.

These processes are still executed: other programs, programs that are tied to their parent
(DIES_WITH_PARENT), `python -c`, commands with Python options or `preexec_fn`, processes in another session,
and processes with an environment that changes how Python, torch or OpenMP start. The marker `executed` makes
a test execute all its commands. The variable PENSIEVE_TESTS_EXECUTE does this for a whole run.

The server ends with the process that started it, and kills the processes that it has forked.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REQUEST_BYTES_MAX = 1 << 20
DESCRIPTORS_MAX = 64
PRELOADED = (
    "pensieve.cli.main",
    "pensieve.launch.costs",
    "pensieve.launch.daemon",
    "pensieve.launch.echo_engine",
    "pensieve.launch.executor",
    "pensieve.api.http.listener",
    "transformers.models.llama.modeling_llama",
)
STARTING = (
    "PYTHON",
    "OMP_",
    "GOMP_",
    "MKL_",
    "LD_",
    "MALLOC_",
    "ATEN_",
    "CUDA_",
    "LC_",
    "LANG",
    "TZ",
)
SET_LATER = ("PYTHONUNBUFFERED",)  # also takes effect in a forked process
# A program that ends with its parent, so the parent must be the real one.
DIES_WITH_PARENT = "pensieve.cluster.die_with_parent"
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def _starting(environment: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the variables that are read while Python starts or torch is imported."""
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(STARTING) and name not in SET_LATER
    ) - {("PYTHONPATH", str(ROOT))}


# -- client side --


class ForkingPopen(subprocess.Popen[Any]):
    """A Popen that lets a server fork its process, if that makes no difference to the process."""

    _server = ""  # the address of the server that forked this process

    def _execute_child(self, *given: Any) -> None:
        (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell) = given[:10]
        pipes, (_, gid, gids, uid, umask, new_session, group) = given[10:16], given[16:]
        plain = not any((executable, preexec_fn, shell)) and close_fds
        as_we_are = (gid, gids, uid, umask, group) == (None, None, None, -1, -1)
        command = [] if isinstance(args, str | bytes | os.PathLike) else [*map(os.fspath, args)]
        environment = dict(os.environ if env is None else env)
        server = ""
        if plain and as_we_are and _is_ours(command):
            server = _server_for(environment)
        if not server or not (new_session or os.getsid(0) == os.getsid(_pid_of(server))):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        theirs = enumerate((pipes[0], pipes[3], pipes[5]))
        standard = [fd if fd != -1 else number for number, fd in theirs]
        request = {
            "start": command[2:],
            "environment": environment,
            "folder": os.fspath(cwd or os.getcwd()),
            "descriptors": [0, 1, 2, *pass_fds],
            "new_session": bool(new_session),
            "limits": [resource.getrlimit(each) for each in LIMITS],
            "cores": sorted(os.sched_getaffinity(0)),
        }
        try:
            answer = _ask(server, request, [*standard, *pass_fds])
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        if "error" in answer:
            raise OSError(answer["error"], os.strerror(answer["error"]))
        self._server = server
        self.pid = int(answer["pid"])
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not self._server:
            waited: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return waited
        try:
            answer = _ask(self._server, {"wait": self.pid, "now": bool(wait_flags & os.WNOHANG)})
        except (FileNotFoundError, ConnectionRefusedError):
            return self.pid, signal.SIGKILL  # the server has ended, and has killed its processes
        return (self.pid, answer["status"]) if "status" in answer else (0, 0)

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if not self._server:
            polled: int | None = super()._internal_poll(*given, **named)  # type: ignore[misc]
            return polled
        lock: threading.Lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            except OSError:
                if not given and not named:
                    raise  # otherwise this is a call of __del__, when the server may be gone
            finally:
                lock.release()
        return self.returncode


def install() -> None:
    """From now on, fork processes whose environment matches the present environment."""
    global _own
    _own = _starting(os.environ)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def end() -> None:
    """End the servers that this process has started. That also ends their forked processes."""
    for lifeline, server in _servers:
        lifeline.close()
        server.wait()
    _servers.clear()
    _addresses.clear()


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Execute all commands inside the block, like users do."""
    before = os.environ.get("PENSIEVE_TESTS_EXECUTE")
    os.environ["PENSIEVE_TESTS_EXECUTE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PENSIEVE_TESTS_EXECUTE"]
        else:
            os.environ["PENSIEVE_TESTS_EXECUTE"] = before


def children_of(pid: int) -> list[int]:
    """Return the running processes that a process has started, executed or forked."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    children = [int(each) for each in found.stdout.split()]
    for address in _addresses.values():
        children += _ask(address, {"children": pid})["pids"]
    return children


def cpu_seconds() -> float:
    """Return the CPU time of the servers and of all their forked processes so far."""
    return sum(float(_ask(address, {"cpu": True})["seconds"]) for address in _addresses.values())


_EXECUTING = subprocess.Popen
_own: frozenset[tuple[str, str]] = frozenset()
_addresses: dict[frozenset[tuple[str, str]], str] = {}
_servers: list[tuple[socket.socket, subprocess.Popen[Any]]] = []
_starting_one = threading.Lock()


def preload(environment: Mapping[str, str]) -> None:
    """Start a server for processes with this environment, in which Python may start differently."""
    key = _starting(environment)
    with _starting_one:
        if key not in _addresses and "PENSIEVE_TESTS_EXECUTE" not in os.environ:
            _addresses[key] = _start_server(environment)


def _is_ours(command: Sequence[str | bytes]) -> bool:
    if len(command) < 3 or command[0] != sys.executable or command[1] != "-m":
        return False
    if command[2] == DIES_WITH_PARENT:
        return False
    return str(command[2]).partition(".")[0] in ("pensieve", "tests")


def _server_for(environment: Mapping[str, str]) -> str:
    if "PENSIEVE_TESTS_EXECUTE" in environment or "PENSIEVE_TESTS_EXECUTE" in os.environ:
        return ""
    key = _starting(environment)
    if key == _own:
        preload(environment)
    return _addresses.get(key, "")


def _pid_of(address: str) -> int:
    return int(address.rpartition("-")[2])


def _ask(address: str, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(address)
        socket.send_fds(sock, [json.dumps(request).encode()], [*descriptors])
        answer = sock.recv(REQUEST_BYTES_MAX)
    if not answer:
        raise ChildProcessError("the fork server has ended")
    return json.loads(answer)


def _start_server(environment: Mapping[str, str]) -> str:
    """Start a server with that environment; return its address after its imports."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
        path = os.pathsep.join([environment.get("PYTHONPATH", ""), str(ROOT)]).strip(os.pathsep)
        server = _EXECUTING(
            command,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    _servers.append((ours, server))
    address = ours.recv(4096).decode()
    if not address:
        raise ChildProcessError("the fork server did not start")
    return address


# -- server side --


class _Server:
    def __init__(self, lifeline: socket.socket) -> None:
        self.folder = tempfile.mkdtemp(prefix="pensieve-forks-")
        self.address = f"{self.folder}/server-{os.getpid()}"
        self._lifeline = lifeline
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(128)
        self._woken, self._wakes = socket.socketpair()
        for sock in (self._listener, self._woken, self._wakes):
            sock.setblocking(False)
        self._running: dict[int, int] = {}  # pid → pid of the process that started it
        self._ended: dict[int, int] = {}  # pid → exit status
        self._waiting: dict[int, list[socket.socket]] = {}

    def serve(self) -> Mapping[str, Any] | None:
        """Serve until the lifeline closes. In a forked process, return the request that it must run."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the forked processes
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        self._lifeline.sendall(self.address.encode())
        with selectors.DefaultSelector() as selector:
            for each in (self._lifeline, self._listener, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    self._woken.recv(4096)
                    self._reap()
                if self._lifeline in ready:
                    break
                if self._listener in ready and (request := self._answer()) is not None:
                    return request
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        while self._running:
            pid, _ = os.wait()
            self._running.pop(pid, None)
        self._close()
        os.unlink(self.address)
        os.rmdir(self.folder)
        return None

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        for sock in (self._lifeline, self._listener, self._woken, self._wakes):
            sock.close()
        for waiting in self._waiting.values():
            for connection in waiting:
                connection.close()

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            del self._running[pid]
            self._ended[pid] = status
            for waiting in self._waiting.pop(pid, ()):
                self._reply(waiting, {"status": status})

    def _answer(self) -> Mapping[str, Any] | None:
        connection, _ = self._listener.accept()
        connection.setblocking(True)
        data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        request = json.loads(data)
        if "start" in request:
            return self._fork(connection, request, descriptors)
        if "children" in request:
            pids = [pid for pid, parent in self._running.items() if parent == request["children"]]
            self._reply(connection, {"pids": pids})
        elif "cpu" in request:
            usages = [
                resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            ]
            self._reply(
                connection, {"seconds": sum(each.ru_utime + each.ru_stime for each in usages)}
            )
        else:
            pid = request["wait"]
            if pid in self._ended:
                self._reply(connection, {"status": self._ended[pid]})
            elif request["now"]:
                self._reply(connection, {})
            else:
                self._waiting.setdefault(pid, []).append(connection)
        return None

    def _fork(
        self, connection: socket.socket, request: dict[str, Any], descriptors: list[int]
    ) -> Mapping[str, Any] | None:
        if not os.path.isdir(request["folder"]):
            self._reply(connection, {"error": 2})
            return None
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        request["parent"] = array.array("i", packed)[0]
        request["given"] = descriptors
        pid = os.fork()
        if pid == 0:
            self._close()
            connection.close()
            return request
        self._running[pid] = request["parent"]
        self._ended.pop(pid, None)
        for fd in descriptors:
            os.close(fd)
        self._reply(connection, {"pid": pid})
        return None

    def _reply(self, connection: socket.socket, answer: Mapping[str, Any]) -> None:
        with connection, contextlib.suppress(OSError):  # the client may have been killed
            connection.sendall(json.dumps(answer).encode())


def _become(request: Mapping[str, Any], address: str) -> str:
    """Make this forked process like an executed process. Return the module to run."""
    for number, handler in (
        (signal.SIGCHLD, signal.SIG_DFL),
        (signal.SIGINT, signal.default_int_handler),
    ):
        signal.signal(number, handler)
    if request["new_session"]:
        os.setsid()
    else:
        with contextlib.suppress(OSError):  # the parent may have ended
            os.setpgid(0, os.getpgid(request["parent"]))
    _place(request["given"], request["descriptors"])
    os.sched_setaffinity(0, request["cores"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module, *arguments = request["start"]
    sys.argv = [module, *arguments]
    sys.orig_argv[:] = [sys.executable, "-m", module, *arguments]
    sys.path[0] = request["folder"]
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        is_line = stream is sys.stderr or stream.isatty()
        stream.reconfigure(line_buffering=is_line, write_through=unbuffered)  # type: ignore[union-attr]
    for which, (soft, hard) in zip(LIMITS, request["limits"], strict=True):
        if resource.getrlimit(which) != (soft, hard):
            resource.setrlimit(which, (soft, hard))
    install()
    _addresses[_own] = address
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it will run as `__main__`
    return str(module)


def _place(given: Sequence[int], wanted: Sequence[int]) -> None:
    """Give descriptors their numbers, and close all others."""
    above = max([*given, *wanted]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in given]
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
    kept = sorted(wanted)
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)


def _run(module: str) -> None:
    """Run a module, then end the process without the usual cleanup, which takes half a second."""
    code: Any = 0
    interrupted = False
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        interrupted = True
    except SystemExit as ended:  # other exceptions end the process as usual
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def main() -> None:
    from pensieve.launch.cpu_threads import prepare_threads

    prepare_threads()
    # Engines start with SIGINT blocked. If an engine is the first to need this server, the server inherits
    # that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["GRPC_VERBOSITY"] = "NONE"  # the command line also sets this before importing gRPC
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # some packages are optional
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keep garbage collection from writing to pages that forks share
    server = _Server(socket.socket(fileno=int(sys.argv[1])))
    request = server.serve()
    if request is not None:
        module = _become(request, server.address)
        del request, server
        _run(module)


if __name__ == "__main__":
    main()
