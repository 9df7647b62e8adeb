"""torchft over nvx: two replicas train, one is killed and comes back: python examples/torchft_replicas.py

torchft makes its groups by class, so NVX_AS does not reach them: give its Manager an nvx.torchft.ProcessGroupNVX.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import torch

STEPS, DIES = 40, 10


def replica(kind, dies):
    """One replica: a process that leaves after STEPS steps, or is killed at step DIES."""
    import torchft

    if kind == "nvx":
        from nvx.torchft import ProcessGroupNVX as Group
    else:
        from torchft import ProcessGroupGloo as Group

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    adam = torch.optim.AdamW(model.parameters())

    def state():
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(given):
        model.load_state_dict(given["model"])
        adam.load_state_dict(given["adam"])

    port = int(os.environ["MASTER_PORT"])  # torchrun would serve the store
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=Group(timeout=timedelta(seconds=20)), load_state_dict=load, state_dict=state, min_replica_size=1,
        replica_id=os.environ["REPLICA"], timeout=timedelta(seconds=20), hostname="127.0.0.1",
    )  # fmt: skip
    ddp = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adam)
    times, alone = [], 0
    while manager.current_step() < STEPS:
        if dies and manager.current_step() == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.perf_counter()
        torch.manual_seed(manager.current_step() * 2 + int(os.environ["REPLICA"]))
        x, y = torch.randn(16, 256), torch.randn(16, 256)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        alone += manager.num_participants() == 1
        if os.environ["REPLICA"] == "0" and alone > 0 and manager.num_participants() == 1:
            time.sleep(0.5)  # so that the other one has time to come back
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    times.sort()
    facts = {"sha256": digest.hexdigest(), "step_ms": 1e3 * times[len(times) // 2], "alone": alone}
    print(json.dumps(facts), flush=True)
    manager.shutdown(wait=False)
    del store


def start(number, kind, dies, lighthouse):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "REPLICA": str(number), "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse.rpartition(':')[2]}",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, __file__, kind, "dies" if dies else "lives"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def two_replicas(kind, kill):
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1 if kill else 2, join_timeout_ms=3000)
    with contextlib.ExitStack() as stack:
        stack.callback(server.shutdown)
        processes = [start(number, kind, kill and number == 1, server.address()) for number in range(2)]
        stack.callback(lambda: [process.kill() for process in processes])
        if kill:
            assert processes[1].wait(timeout=120) == -signal.SIGKILL
            processes[1] = start(1, kind, False, server.address())
        output = [process.communicate(timeout=120)[0] for process in processes]
        assert all(process.returncode == 0 for process in processes), [p.returncode for p in processes]
        return [json.loads(text.splitlines()[-1]) for text in output]


def main():
    gloo, nvx = two_replicas("gloo", False), two_replicas("nvx", False)
    killed = two_replicas("nvx", True)
    equal = len({one["sha256"] for one in gloo + nvx}) == 1
    print(
        f"torchft_replicas: gloo {gloo[0]['step_ms']:.2f} ms, nvx {nvx[0]['step_ms']:.2f} ms a step, gloo / nvx"
        f" {gloo[0]['step_ms'] / nvx[0]['step_ms']:.2f}, weights {'equal' if equal else 'DIFFER'}; one killed and back:"
        f" the other trained alone for {killed[0]['alone']} steps, replicas"
        f" {'equal' if killed[0]['sha256'] == killed[1]['sha256'] else 'DIFFER'}"
    )
    if not equal or killed[0]["sha256"] != killed[1]["sha256"] or not killed[0]["alone"]:
        raise SystemExit(f"not as expected: {gloo} {nvx} {killed}")


if __name__ == "__main__":
    if "REPLICA" in os.environ:
        replica(sys.argv[1], sys.argv[2] == "dies")
    else:
        main()
