"""Processes of Python that are fresh but for one thing: they have imported torch already, which takes longer than
most of what tests want of a process.

    warm.Popen(["-c", code, *arguments], env=environment, stdout=subprocess.PIPE)
    warm.run(["-m", "nvx.cli", "doctor"], capture_output=True, text=True)

are subprocess.Popen() and subprocess.run() with sys.executable in front. Each process is forked from one that has
imported torch and whatever that brings, but nothing of nvx's own library: code, arguments, environment, directory,
output and the way in which it ends are its own, and it is a child of the process that started it. There is one to fork
from for each environment that differs in what is read before that import.
"""

import atexit
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys

# Prefixes of variables that Python, its linker, torch and nvx's hook read before a program's own code runs.
READ_BEFORE = ("PYTHON", "LD_", "TORCH", "OMP_", "OPENBLAS_", "MKL_", "CUDA_", "PYTORCH_", "NVX_AS")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LENGTH = struct.Struct("!I")


class Popen(subprocess.Popen):
    """As subprocess.Popen() of this interpreter with these arguments: ["-c", code, ...] or ["-m", module, ...]."""

    def __init__(self, arguments, **how):
        self._arguments = list(map(str, arguments))
        super().__init__([sys.executable, *self._arguments], **how)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        # rest: (startupinfo, creationflags, shell, and the two ends of each pipe, ...).
        environment = dict(os.environ if env is None else env)
        if preexec_fn or pass_fds:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        files = [own if own != -1 else usual for own, usual in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        self.pid = Source.of(environment).start((self._arguments, environment, os.path.abspath(cwd or ".")), files)
        self._child_created = True
        devnull = getattr(self, "_devnull", None)
        pipes = ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread))
        ends = {theirs for theirs, ours in pipes if ours != -1}
        for file in (ends | {devnull}) - {-1, None}:
            os.close(file)


def run(arguments, *, timeout=None, check=False, capture_output=False, **how):
    """As subprocess.run() of this interpreter."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(arguments, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Source:
    """The process that the others are forked from, as the process that started it sees it."""

    _known = {}

    @classmethod
    def of(cls, environment):
        """This process's own one for such an environment."""
        before = frozenset(pair for pair in environment.items() if pair[0].startswith(READ_BEFORE))
        key = os.getpid(), before
        if key not in cls._known:
            cls._known[key] = cls(environment)
        return cls._known[key]

    def __init__(self, environment):
        self.owner = os.getpid()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the source starts and lets go of is a child of ours
        self.connection, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        atexit.register(self.end)

    def start(self, job, files):
        """The number of a process that does the job with these files as its first three."""
        packed = pickle.dumps(job)
        socket.send_fds(self.connection, [LENGTH.pack(len(packed))], files)
        self.connection.sendall(packed)
        answer = receive(self.connection, LENGTH.size)
        if answer is None:
            raise RuntimeError("the process that tests' processes are forked from has ended")
        return LENGTH.unpack(answer)[0]

    def end(self):
        if self.owner == os.getpid():
            self.connection.close()
            self.process.wait()


def receive(connection, length):
    """So many bytes, or None where the other side has gone."""
    parts = bytearray()
    while len(parts) < length:
        part = connection.recv(length - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def serve(connection):
    """The life of the source. Returns in each process that it starts, with that one's job, and ends in its own."""
    while True:
        head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        packed = receive(connection, *LENGTH.unpack(head)) if head else None
        if packed is None:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for at, file in enumerate(files):
                    os.dup2(file, at)
                for file in {*files, reader, writer} - {0, 1, 2}:
                    os.close(file)
                connection.close()
                return pickle.loads(packed)
            os.write(writer, LENGTH.pack(child))
            os._exit(0)
        os.waitpid(between, 0)  # only then is the child the other one's
        connection.sendall(os.read(reader, LENGTH.size))
        for file in (*files, reader, writer):
            os.close(file)


def become(job):
    """Makes this process run the job, as far as Python can. Returns "-c" or "-m", and the code or the module."""
    arguments, environment, folder = job
    kind, what, *rest = arguments
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [kind, *rest]
    sys.path[0] = "" if kind == "-c" else folder
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return kind, what


def run_as_main(kind, what):
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    code, names, of_python = compile(what, "<string>", "exec"), globals(), __builtins__
    names.clear()
    names.update(__name__="__main__", __builtins__=of_python, __spec__=None)
    exec(code, names)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed  # noqa: F401

    gc.collect()
    gc.freeze()  # so that no collection writes to what all share
    run_as_main(*become(serve(socket.socket(fileno=int(sys.argv[1])))))
