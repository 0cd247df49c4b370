"""Log steps with one tool and print how long each call held up the loop.

Runs in the tool's own virtual environment, so it imports nothing of ours:

    <python of the venv> benchmarks/peer.py tensorboard 2000 busy <folder>

Each step logs three numbers: loss, scale and skipped. The output is nanoseconds, as JSON.
"""

import hashlib
import json
import os
import sys
import time

BLOCK = bytes(2**20)


def step_itself(kind):
    """Take about a millisecond without the GIL, so that a tool's threads can work.

    A busy step runs native code on a processor, like a training step. An idle step sleeps, and
    after a sleep the host runs any code slowly.
    """
    if kind == "busy":
        hashlib.sha256(BLOCK)
    else:
        time.sleep(0.001)


def trackio(folder):
    """Return two functions for Trackio: one logs a step, the other ends the run."""
    os.environ["TRACKIO_DIR"] = folder
    import trackio

    trackio.init(project="bench", embed=False)
    return lambda step, numbers: trackio.log(numbers, step=step), trackio.finish


def tensorboard(folder):
    """Return two functions for TensorBoard: one logs a step, the other ends the run."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)

    def log(step, numbers):
        values = [Summary.Value(tag=name, simple_value=n) for name, n in numbers.items()]
        summary = Summary(value=values)
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return log, writer.close


def wandb(folder):
    """Return two functions for W&B: one logs a step, the other ends the run."""
    import wandb

    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def aim(folder):
    """Return two functions for Aim: one logs a step, the other ends the run."""
    from aim import Run

    run = Run(repo=folder, system_tracking_interval=None, log_system_params=False)

    def log(step, numbers):
        for name, number in numbers.items():
            run.track(number, name=name, step=step)

    return log, run.close


def mlflow(folder):
    """Return two functions for MLflow: one logs a step, the other ends the run."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.start_run()

    def log(step, numbers):
        mlflow.log_metrics(numbers, step=step, synchronous=False)

    return log, lambda: (mlflow.flush_async_logging(), mlflow.end_run())


def main():
    """Log the requested number of steps."""
    name, steps, kind, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    log, close = {f.__name__: f for f in (trackio, tensorboard, wandb, aim, mlflow)}[name](folder)
    held = []
    for step in range(1, steps + 1):
        numbers = {"loss": 1.0 / step, "scale": 65536.0, "skipped": float(step % 500 == 0)}
        started = time.perf_counter_ns()
        log(step, numbers)
        held.append(time.perf_counter_ns() - started)
        step_itself(kind)
    close()
    print(json.dumps(held))


if __name__ == "__main__":
    main()
