"""Write runs with one tool, to be shown by its server: runs in the tool's own environment.

    <python of the venv> benchmarks/dashboard_peer.py mlflow <folder>

The script reads the runs from runs.json beside that folder and imports nothing of ours. It prints
the tool's name for each run, as JSON.
"""

import json
import os
import sys
from pathlib import Path


def mlflow(folder, runs):
    """Write runs into a SQLite database, by MLflow's store in batches."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("bench", artifact_location=f"file://{folder}/files")
    for run in runs:
        run_id = client.create_run(experiment, run_name=run["name"]).info.run_id
        params = [Param(name, str(value)) for name, value in run["params"].items()]
        last = Metric("accuracy", run["accuracy"], 1, len(run["losses"]))
        client.log_batch(run_id, metrics=[last], params=params)
        for first in range(0, len(run["losses"]), 1000):
            some = enumerate(run["losses"][first : first + 1000], first + 1)
            client.log_batch(run_id, metrics=[Metric("loss", loss, 1, step) for step, loss in some])
        client.set_terminated(run_id)
        yield run_id


def aim(folder, runs):
    """Write runs into an Aim repository."""
    from aim import Run

    for row in runs:
        run = Run(repo=folder, system_tracking_interval=None, log_system_params=False)
        run.name = row["name"]
        run["hparams"], run["accuracy"] = row["params"], row["accuracy"]
        for step, loss in enumerate(row["losses"], 1):
            run.track(loss, name="loss", step=step)
        run.track(row["accuracy"], name="accuracy", step=len(row["losses"]))
        run.close()
        yield run.hash


def tensorboard(folder, runs):
    """Write event files, with the data of TensorBoard's table of hyperparameters."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    def session(tag, **fields):
        data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **fields)
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=data.SerializeToString())
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))
        return Event(summary=Summary(value=[value]))

    for run in runs:
        writer = EventFileWriter(f"{folder}/{run['name']}")
        started = plugin_data_pb2.SessionStartInfo()
        for name, value in run["params"].items():
            started.hparams[name].number_value = value
        writer.add_event(session(metadata.SESSION_START_INFO_TAG, session_start_info=started))
        for step, loss in enumerate(run["losses"], 1):
            value = Summary.Value(tag="loss", simple_value=loss)
            writer.add_event(Event(step=step, summary=Summary(value=[value])))
        value = Summary.Value(tag="accuracy", simple_value=run["accuracy"])
        writer.add_event(Event(step=len(run["losses"]), summary=Summary(value=[value])))
        ended = plugin_data_pb2.SessionEndInfo(status=1)  # success
        writer.add_event(session(metadata.SESSION_END_INFO_TAG, session_end_info=ended))
        writer.close()
        yield run["name"]


def main():
    """Write all runs with the chosen tool."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    runs = json.loads((folder.parent / "runs.json").read_text())
    write = {each.__name__: each for each in (mlflow, aim, tensorboard)}[name]
    print(json.dumps(list(write(str(folder), runs))))


if __name__ == "__main__":
    main()
